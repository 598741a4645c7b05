"""Draws under top-k, top-p and min-p where the logits are: the definition's tokens, and hardly ever a whole row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine import decoder
from paceline.engine.cuda import candidates, static_engine
from paceline.engine.cuda import filters as device_filters
from paceline.engine.cuda.filters import MOST_K, SHARE_ERROR
from paceline.engine.cuda.graphs import StepRunner
from paceline.engine.cuda.kernels import TORCH
from paceline.engine.cuda.noise import Race, race_candidates
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.interface import Filters, Ranking, StepItem, StepPlan
from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling.distribution import processed_scores
from tests.engine import tiny
from tests.engine.parallel.test_parallel_engine import drawn_text, plain_text
from tests.engine.test_device_engine import Capturing
from tests.engine.test_device_noise import IN_FULL_BY_TRITON, KEY, Row, defined, kernel, race, raced

__all__ = ["kernel", "race"]
CARDS = {
    "top-p": (0.6, Filters(top_p=0.95)),
    "top-p of most": (1.0, Filters(top_p=0.8)),
    "top-k and top-p": (0.7, Filters(20, 0.8)),
    "all of them": (1.0, Filters(64, 0.95, 0.01)),
    "min-p": (1.0, Filters(min_p=0.1)),
}
"""Temperatures and filters as model cards have them."""


def tokens_of(logits: Row, ranking: Ranking, race: Race = race_candidates) -> tuple[list[int], int]:
    """Tokens by the device's arithmetic, and how many rows were read whole for them."""
    rows, whole_rows = raced(logits, ranking, 8, race), 0

    class Counter:
        def __getitem__(self, places: Any) -> Row:
            nonlocal whole_rows
            whole_rows += len(places)
            few: Row = logits[places]
            return few

    whole: Any = Counter
    return list(replace(rows, whole=whole).drawn_tokens().token_ids), whole_rows


def by_definition(logits: Row, ranking: Ranking) -> list[int]:
    return [tokens[0] for tokens in defined(logits, ranking)]


def ranking_of(rows: int, temperature: float, filters: Filters, seed: int = 1) -> Ranking:
    return Ranking(NoiseKey(seed, 3), temperature, tuple(range(seed % 1000, seed % 1000 + rows)), 1, filters)


@IN_FULL_BY_TRITON
@settings(max_examples=25, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 2, 3, 8, 13, 64, 130, 256, 1000]),
    temperature=st.sampled_from([1e-6, 0.01, 0.6, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 20, MOST_K]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.25, 0.5, 0.9, 0.95, 1 - 2.0**-18, 1 - 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 4),
)
def test_the_device_draws_what_the_definition_draws(
    race: Race, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    filters = Filters(top_k, top_p, min_p)
    for each in range(seed, seed + (4 if race is TORCH.race else 1)):  # an interpreted kernel is slow
        check_draws(race, vocab_size, ranking_of(3, temperature, filters, each), np.random.default_rng(each))


def check_draws(race: Race, vocab_size: int, ranking: Ranking, rng: np.random.Generator) -> None:
    numbers = rng.standard_normal((3, vocab_size)) * rng.choice([0, 0.3, 3, 30, 3000])
    numbers = np.round(numbers, int(rng.choice([0, 1, 6])))  # ties, and zeros of both signs
    numbers[rng.random(numbers.shape) < rng.choice([0, 0.5, 0.95])] = -np.inf
    numbers[np.arange(3), rng.integers(vocab_size, size=3)] = rng.choice([-3.0, 3.0])
    logits = numbers.astype(np.float32)
    assert tokens_of(logits, ranking, race)[0] == by_definition(logits, ranking)
    more = replace(ranking, count=3)
    assert [each.token_ids for each in raced(logits, more, 11, race).ranked_tokens()] == defined(logits, more)


def edges() -> list[tuple[Row, Ranking]]:
    """Rows whose kept ids end in a tie, or whose mass ends at top-p exactly."""
    rng, n = np.random.default_rng(4), 60
    flat = np.zeros((n, 64), np.float32)
    halves = np.log(np.array([[2.0 ** -(1 + min(i, 6)) for i in range(8)]] * n, np.float32))
    ties = rng.permuted(np.repeat(np.arange(16, dtype=np.float32) / 4, 4)[None].repeat(n, 0), axis=1)
    signs = np.where(np.arange(64) % 3 == 0, -0.0, 0.0).astype(np.float32)[None].repeat(n, 0)
    near = np.float32(1) + rng.integers(0, 3, (n, 64)).astype(np.float32) * np.float32(2.0**-23)
    rows = (flat, halves, ties, signs, near)
    filters = [Filters(top_p=share) for share in (0.25, 0.5, 0.75, 1 / 3)]
    filters += [Filters(top_k=k) for k in (1, 3, 6, 63)]
    filters += [Filters(6, 0.5), Filters(10, 0.75, 0.3), Filters(min_p=0.5)]
    return [(row, ranking_of(n, 1.0 if i % 2 else 0.8, each)) for row in rows for i, each in enumerate(filters)]


def test_ties_and_masses_at_the_edge_of_what_is_kept() -> None:
    for logits, ranking in edges():
        assert tokens_of(logits, ranking)[0] == by_definition(logits, ranking), ranking.filters


def test_rows_of_numbers_that_are_not_finite() -> None:
    logits = np.array([[3e38, 2.9e38, *[0.0] * 30], [1.0, 2.0, *[0.0] * 30]], np.float32)
    ranking = ranking_of(2, 0.01, Filters(3, 0.5, 0.2))
    assert tokens_of(logits, ranking) == (by_definition(logits, ranking), 2)
    for bad in (np.nan, np.inf):
        logits[1, 4] = bad
        with pytest.raises(InvalidInput, match="largest logit"):
            tokens_of(logits, ranking)


def plausible_rows(rows: int, vocab_size: int, seed: int = 6) -> Row:
    """Rows of a long tail behind few leaders: most are sure of themselves, some aren't, as a model's are."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocab_size)) * 2
    logits[:, :50] += 8 + rng.exponential(3, (rows, 50)) * rng.choice([0.2, 1, 2], (rows, 1))
    return logits.astype(np.float32)


@pytest.mark.parametrize("card", ["top-p", "all of them", "min-p", *tiny.in_full("top-p of most", "top-k and top-p")])
def test_a_row_is_hardly_ever_read_whole(card: str) -> None:
    temperature, filters = CARDS[card]
    logits = plausible_rows(600, 8000)
    ranking = ranking_of(600, temperature, filters)
    tokens, whole_rows = tokens_of(logits, ranking)
    plain = by_definition(logits, ranking)
    assert tokens == plain
    assert whole_rows <= 6
    few = replace(ranking, filters=Filters(), positions=ranking.positions[:60])
    assert plain[:60] != by_definition(logits[:60], few), "filters decide something here"


def differs(logits: Row, ranking: Ranking) -> bool:
    try:
        return tokens_of(logits, ranking)[0] != by_definition(logits, ranking)
    except IndexError:
        return True  # nothing is left


MUTANTS = {
    "the mass of the id itself counts": ("keys > key", "keys >= key"),
    "of equals the highest id comes first": ("WORD - torch.arange(", "torch.arange("),
    "-0 stands behind 0": ("[:, None] + 0.0", "[:, None]"),
    "negative scores sort upside down": ("(bits ^ (bits >> 31 & _VALUE_BITS))", "bits"),
    "shares of all ids, whatever top-k keeps": ("(weights * (scores >= least)).sum(dim=1)", "weights.sum(dim=1)"),
    "the place behind the k-th": ("(top_k - 1)", "top_k"),
    "equals of the k-th are dropped": (".gather(1, ids) < least", ".gather(1, ids) <= least"),
    "nothing is dropped by top-k": (".gather(1, ids) < least, torch.inf", ".gather(1, ids) < least, 0"),
    "mass at temperature 1": ("logits / temperatures.masked_fill(temperatures == 0, 1.0)[:, None]", "logits"),
    "mass in place of its share": (" / total[:, None]", ""),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_catches(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    source = inspect.getsource(device_filters.shares_before)
    old, new = MUTANTS[mutant]
    assert source.count(old) == 1
    own = dict(vars(device_filters))
    exec(source.replace(old, new), own)
    monkeypatch.setattr(device_filters, "shares_before", own["shares_before"])
    plausible = [(plausible_rows(100, 300) - 9, ranking_of(100, *card)) for card in CARDS.values()]
    assert any(differs(*each) for each in [*edges(), *plausible])


@pytest.mark.parametrize("bound", [SHARE_ERROR, 0.0])
def test_a_device_that_rounds_otherwise_changes_no_token(monkeypatch: pytest.MonkeyPatch, bound: float) -> None:
    """Shares off by up to the bound; without it, where a mass ends at top-p, they decide wrongly."""
    exact, generator = device_filters.shares_before, torch.Generator(tiny.DEVICE).manual_seed(3)

    def round_otherwise(*arguments: torch.Tensor) -> torch.Tensor:
        shares = exact(*arguments)
        noise = torch.rand(shares.shape, generator=generator, device=shares.device, dtype=shares.dtype)
        return torch.where(shares > 0, shares + SHARE_ERROR * (1.98 * noise - 0.99), shares)

    monkeypatch.setattr(device_filters, "shares_before", round_otherwise)
    monkeypatch.setattr(candidates, "SHARE_ERROR", bound)
    assert any(differs(*each) for each in edges()) is (bound == 0)


@pytest.mark.parametrize(("rows", "vocab_size", "scale"), [(4, 50_000, 0.0), (4, 50_000, 1.0), (4, 50_000, 5.0)])
@pytest.mark.parametrize("top_k", [0, 100])
def test_shares_are_within_their_bound(rows: int, vocab_size: int, scale: float, top_k: int) -> None:
    """Sixteen times within, in fact: beside sums in float64 of the definition's own scores."""
    logits = (np.random.default_rng(7).standard_normal((rows, vocab_size)) * scale).astype(np.float32)
    scores = processed_scores(logits, SamplingParams(0.7, top_k))
    ids = np.argsort(-scores, axis=1, kind="stable")[:, [0, 1, 7, 60, 99]]
    arguments = (logits, np.full(rows, 0.7, np.float32), np.full(rows, top_k), ids)
    shares = device_filters.shares_before(*(torch.as_tensor(each, device=tiny.DEVICE) for each in arguments))
    weights = np.exp(np.sort(scores, axis=1)[:, ::-1].astype(np.float64) - scores.max(axis=1, keepdims=True))
    before = np.cumsum(weights, axis=1) - weights
    exact = before[:, [0, 1, 7, 60, 99]] / weights.sum(axis=1, keepdims=True)
    assert np.abs(shares.numpy(force=True) - exact).max() < SHARE_ERROR / 16
    assert (shares[:, 0] == 0).all()


FILTERED = SamplingParams(1.5, top_k=30, top_p=0.7, min_p=0.02)


@pytest.fixture
def replaying_engine(monkeypatch: pytest.MonkeyPatch) -> StaticEngine:
    monkeypatch.setattr(decoder, "runner_for", lambda device, *, graphs: Capturing())
    return tiny.static(tiny.random_model(tiny.llama()), kv_bytes=1 << 20, max_num_seqs=1)


@pytest.mark.parametrize("uploads", [True, False])
def test_a_graph_takes_each_steps_own_filters(
    replaying_engine: StaticEngine, monkeypatch: pytest.MonkeyPatch, uploads: bool
) -> None:
    engine = replaying_engine
    if not uploads:  # a mutant: filters are part of what was captured
        shares = device_filters.shares_before
        monkeypatch.setattr(
            static_engine, "shares_before", lambda logits, t, top_k, ids: shares(logits, t, top_k * 0 + 30, ids)
        )
    chains = (FILTERED, replace(FILTERED, top_k=2), replace(FILTERED, temperature=0.4, top_p=0.9))
    texts = [(drawn_text(engine, sampling, 20), plain_text(engine, sampling, 20)) for sampling in chains]
    assert all(text == plain for text, plain in texts) is uploads
    assert len({*map(tuple, (text for _, text in texts))}) == len(texts)


def test_rows_with_filters_beside_others() -> None:
    """More rows than are filtered at once: sessions with filters, without, greedy, and some that bring logits."""
    engine, rankings, items = tiny.static(tiny.random_model(tiny.llama()), kv_bytes=1 << 22), [], []
    kinds = [None, Ranking(KEY, 0.0, (1,) * 5), Ranking(KEY, 1.2, (1,) * 5, 30)]
    kinds += [Ranking(KEY, 1.2, (1,) * 5, 1, each) for each in (Filters(3), Filters(top_p=0.6), Filters(9, 0.9, 0.1))]
    for session in range(4 * len(kinds)):
        engine.open(session, 8)
        items.append(StepItem(session, 0, (session, 2, 3, 4, 5), logit_rows=(0, 1, 2, 3, 4)))
        rankings.append(kinds[session % len(kinds)])
    answers = engine.step_and_rank(StepPlan(tuple(items)), rankings)
    drawn_rows = [None if isinstance(each, np.ndarray) else each.ranked_tokens() for each in answers]
    tokens = [rows and [row.token_ids for row in rows] for rows in drawn_rows]
    logits = engine.step(StepPlan(tuple(items)))
    assert tokens == [kind and defined(rows, kind) for kind, rows in zip(rankings, logits, strict=True)]


@pytest.mark.parametrize(
    ("name", "mutant", "filters"),
    [
        ("candidates._judge", lambda shares, ratios, filters: (shares < np.inf, shares < 0), Filters(top_p=0.7)),
        ("candidates.ratios_to", lambda largest, scores: np.ones(scores.shape), Filters(min_p=0.3)),
        ("static_engine.shares_before", lambda logits, temperatures, top_k, ids: 0.0 * ids, Filters(top_p=0.7)),
        ("static_engine.shares_before", lambda logits, temperatures, top_k, ids: 0.0 * ids, Filters(5)),
    ],
    ids=["filters are forgotten", "all ids are as probable", "nothing stands before", "top-k is forgotten"],
)
def test_the_texts_catch(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., Any], filters: Filters
) -> None:
    engine = tiny.static(tiny.random_model(tiny.llama()), kv_bytes=1 << 20)
    sampling = SamplingParams(1.5, filters.top_k, filters.top_p, filters.min_p)
    plain = plain_text(engine, sampling)
    assert drawn_text(engine, sampling) == plain
    monkeypatch.setattr(engine, "_runner", StepRunner())  # a graph would go on with what it was numbers of
    monkeypatch.setattr(engine, "_kernels", TORCH)
    monkeypatch.setattr(f"paceline.engine.cuda.{name}", mutant)
    assert drawn_text(engine, sampling) != plain
