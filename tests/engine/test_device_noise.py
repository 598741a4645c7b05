"""The device's noise and races, on a CPU unless told otherwise: stored integers, and tokens by the definition."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.engine.cuda import candidates, filters, noise
from paceline.engine.cuda.candidates import RacedRows, candidates_of, clear_tokens
from paceline.engine.cuda.graphs import StepRunner
from paceline.engine.cuda.kernels import TORCH, triton_kernels
from paceline.engine.cuda.noise import Race, check_race, counter_of, log_exponentials, race_candidates, words
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.interface import NO_FILTERS, Ranking, StepItem, StepPlan
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round
from paceline.sampling.distribution import processed_scores
from paceline.sampling.noise import Stream, address_of
from paceline.sampling.racing import race_best, race_values
from target_service.verifier import draw_of, drawn_verdict, verify
from tests.engine import tiny
from tests.engine.parallel.test_parallel_engine import drawn_text, plain_text
from tests.engine.tiny import DEVICE, step
from tests.sampling.field import exponentials

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "noise.json").read_text())
IN_ROUND_ZERO = [case for case in VECTORS["draws"] if case["round_key"] == 0]
KEY = NoiseKey(0x1234_5678_9ABC_DEF0, 5)
Row = NDArray[np.float32]
LIKE_A_DEVICE: dict[str, Any] = {"over": "ignore", "divide": "ignore", "invalid": "ignore"}
"""Of an interpreter: a device warns of nothing."""
assert len(IN_ROUND_ZERO) >= 2, "of more than one stream and seed"


@pytest.mark.parametrize("case", IN_ROUND_ZERO)
def test_stored_vectors(case: dict[str, Any]) -> None:
    key, stream = NoiseKey(int(case["seed"], 16), case["sample_index"]), Stream(case["stream"])
    ids = case["ids"]
    drawn = words(on_device([counter_of(key, case["position"], stream)]), max(ids) + 1)[:, ids]
    assert drawn[0].tolist() == [int(word, 16) for word in case["words"]]
    logs = log_exponentials(drawn)[0].numpy(force=True)
    stored = np.log([float.fromhex(value) for value in case["exponentials"]])
    np.testing.assert_allclose(logs, stored, atol=2.0**-20, rtol=2.0**-21)


def test_logarithms_at_the_ends_of_the_integers_and_of_many() -> None:
    edges = np.array([0, 1, 2, 2**24 - 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1])
    exact = np.log(-np.log1p(-(edges + 0.5) / 2.0**32))
    np.testing.assert_allclose(
        log_exponentials(on_device(edges)).numpy(force=True), exact, atol=2.0**-20, rtol=2.0**-21
    )
    drawn = words(on_device([counter_of(KEY, 3)]), 60_000)
    exact = np.log(exponentials(KEY, Stream.DRAFT, 3, 60_000).astype(np.float64))
    assert np.abs(log_exponentials(drawn)[0].numpy(force=True) - exact).max() < 2.0**-19


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """The module of Triton's race, interpreted on a CPU, in blocks so small that rows have several."""
    with pytest.MonkeyPatch.context() as patch:
        pytest.importorskip("triton", reason="Triton, which comes with torch for GPUs, is not installed")
        module = importlib.import_module("paceline.engine.cuda.race_kernel")
        patch.setattr(module, "BLOCK_IDS", 256)
        yield module


@pytest.fixture(scope="module", params=["torch", "triton"])
def race(request: pytest.FixtureRequest) -> Race:
    if request.param == "triton":
        request.getfixturevalue("kernel")
    return triton_kernels().race if request.param == "triton" else TORCH.race


IN_FULL_BY_TRITON = pytest.mark.parametrize("race", ["torch", *tiny.in_full("triton")], indirect=True)
"""Interpreted, it takes ten seconds; a test of its own has its values bit for bit."""


def on_device(numbers: Any) -> torch.Tensor:
    return torch.as_tensor(numbers, device=DEVICE)


def raced(logits: Row, ranking: Ranking, count: int, race: Race = race_candidates) -> RacedRows:
    """What an engine makes of rows; `count` candidates of each."""
    count = min(count, logits.shape[1])
    counters = [counter_of(ranking.noise, position) for position in ranking.positions]
    temperatures = np.full(len(logits), ranking.temperature, np.float32)
    with np.errstate(**LIKE_A_DEVICE):
        numbers = race(on_device(logits), on_device(counters), on_device(temperatures), count)
    if ranking.filters != NO_FILTERS:
        top_k = on_device([ranking.filters.top_k] * len(logits))
        ids = numbers[:, 2 + count : 2 + 2 * count].long()
        shares = filters.shares_before(on_device(logits), on_device(temperatures), top_k, ids)
        numbers = torch.cat((numbers, shares), dim=1)
    row_filters = np.array([astuple(ranking.filters)] * len(logits))
    best = candidates_of(numbers.numpy(force=True), count, logits.shape[1], temperatures, row_filters)
    counts = np.full(len(logits), ranking.count)
    return RacedRows(ranking, best, lambda: logits, clear_tokens(best, temperatures, counts))


def defined(logits: Row, ranking: Ranking) -> list[tuple[int, ...]]:
    scores = processed_scores(logits, ranking.sampling)
    if ranking.greedy:
        orders = np.argsort(-logits, axis=1, kind="stable")
        best = [order[logits[i, order] > -np.inf] for i, order in enumerate(orders)]
        return [tuple(order[: ranking.count].tolist()) for order in best]
    places = zip(scores, ranking.positions, strict=True)
    return [race_best(row, ranking.count, ranking.noise, Stream.DRAFT, position) for row, position in places]


@IN_FULL_BY_TRITON
@settings(max_examples=100, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 2, 3, 5, 8, 13, 64, 130, 256, 1000]),
    rows=st.integers(1, 3),
    count=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 1e-6, 0.01, 0.6, 1.0, 3.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_device_draws_what_the_definition_draws(
    race: Race, vocab_size: int, rows: int, count: int, temperature: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((rows, vocab_size)) * rng.choice([0, 0.3, 3, 30, 3000])
    made = np.round(made, int(rng.choice([0, 1, 6])))
    made[rng.random(made.shape) < rng.choice([0, 0.5, 0.95])] = -np.inf
    made[np.arange(rows), rng.integers(vocab_size, size=rows)] = rng.choice([-3.0, 3.0])
    logits = made.astype(np.float32)
    positions = tuple(int(each) for each in rng.integers(1 << 32, size=rows))
    ranking = Ranking(NoiseKey(seed, 3), temperature, positions, count)
    expected = defined(logits, ranking)
    found = raced(logits, ranking, count + 8, race)
    assert found.drawn_tokens().token_ids == tuple(tokens[0] for tokens in expected)
    for each, tokens, row in zip(found.ranked_tokens(), expected, logits, strict=True):
        assert each.token_ids == tokens
        if temperature == 0 or temperature >= 0.6:  # below, float32 has no room for the scores' own differences
            scaled = row.astype(np.float64) / (temperature or 1)
            softmax = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum()
            np.testing.assert_allclose(each.probabilities, softmax[list(tokens)], atol=2e-3)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("mutated", [False, True])
def test_tokens_are_clear_where_no_other_order_is_possible(monkeypatch: pytest.MonkeyPatch, mutated: bool) -> None:
    """Of each row the floor, the largest logit, the values of ids 7 and 3, the temperature, the tokens asked for."""
    if mutated:
        monkeypatch.setattr(candidates, "margin", lambda value: 0 * value)
    rows: dict[tuple[float, ...], list[int]] = {
        (-INF, 2.0, 5.0, 4.9, 1.0, 1): [7],
        (-INF, 2.0, 5.0, 4.9, 1.0, 2): [7, 3],
        (-INF, 2.0, 5.0, 4.9995, 1.0, 1): [7] if mutated else [],
        (4.8995, 2.0, 5.0, 4.9, 1.0, 2): [7, 3] if mutated else [],
        (-INF, 2.0, 5.0, 4.9, 1.0, 3): [],  # there are two
        (-INF, 5.0, 5.0, 5.0, 0.0, 2): [3, 7],
        (-INF, 5.0, 5.0, 4.9999, 0.0, 2): [7, 3],
        (4.9, 5.0, 5.0, 4.9, 0.0, 2): [],
        (4.9, 5.0, 5.0, 4.9, 0.0, 1): [7],
        (-INF, 2.0, 5.0, -INF, 1.0, 1): [7],
        (-INF, 2.0, 5.0, -INF, 1.0, 2): [],
        (-INF, NAN, 5.0, 4.0, 1.0, 1): [],
        (-INF, 2.0, NAN, 4.0, 1.0, 1): [],
        (-INF, 3e38, 5.0, 4.0, 0.01, 1): [],
    }
    columns = [(floor, largest, 0.0, *best, 7.0, 3.0, 1.0, 1.0) for floor, largest, *best, _, _ in rows]
    temperatures = np.array([row[-2] for row in rows], np.float32)
    counts = np.array([row[-1] for row in rows], np.intp)
    found = clear_tokens(np.array(columns), temperatures, counts)
    tokens = zip(found.token_ids.tolist(), counts, found.is_clear, strict=True)
    assert [ids[:count] if is_clear else [] for ids, count, is_clear in tokens] == list(rows.values())


@pytest.mark.parametrize("bad", [np.nan, -np.float32("nan"), np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_nothing_to_draw_are_refused(race: Race, bad: float, temperature: float) -> None:
    logits = np.full((1, 20), bad if bad < 0 else 0.0, np.float32)
    logits[0, 7] = bad
    with pytest.raises(InvalidInput, match="largest logit"):
        raced(logits, Ranking(KEY, temperature, (4,)), 9, race).drawn_tokens()


def test_scores_that_overflow_are_read_whole(race: Race) -> None:
    logits = np.array([[3e38, 2.9e38, *[0.0] * 30]], np.float32)
    ranking = Ranking(KEY, 0.01, (4,), 2)
    (ranked,) = raced(logits, ranking, 9, race).ranked_tokens()
    assert ranked.token_ids == defined(logits, ranking)[0]
    assert ranked.probabilities[0] == 1


def test_a_row_is_read_whole_only_where_its_candidates_do_not_suffice() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((40, 500)).astype(np.float32)
    ranking = Ranking(KEY, 0.7, tuple(range(40)), 1)
    found = raced(logits, ranking, 9)

    def never() -> Row:
        raise AssertionError("read whole")

    enough = RacedRows(ranking, found.candidates, never)
    assert enough.drawn_tokens().token_ids == tuple(tokens[0] for tokens in defined(logits, ranking))
    greedy = Ranking(KEY, 0.0, (0,))
    ties = RacedRows(greedy, raced(0 * logits[:1], greedy, 9).candidates, never)
    with pytest.raises(AssertionError, match="read whole"):
        ties.drawn_tokens()


@pytest.fixture(scope="module")
def engine() -> StaticEngine:
    return tiny.static(tiny.random_model(tiny.qwen3_padded()), kv_bytes=1 << 22)


CASES = [
    (Acceptance.COUPLED, SamplingParams(temperature=0.8), True),
    (Acceptance.COUPLED, SamplingParams(temperature=0.0), True),
    (Acceptance.COUPLED, SamplingParams(temperature=0.8, top_k=128, top_p=0.9), True),
    (Acceptance.COUPLED, SamplingParams(temperature=1.3, top_k=9, top_p=0.6, min_p=0.01), True),
    (Acceptance.COUPLED, SamplingParams(temperature=0.0, top_k=9, top_p=0.6), True),
    (Acceptance.COUPLED, SamplingParams(temperature=0.8, top_k=129), False),
    (Acceptance.COUPLED, SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.1), False),
    (Acceptance.REJECTION, SamplingParams(temperature=0.8, top_p=0.9), False),
    (Acceptance.REJECTION, SamplingParams(temperature=0.8), False),
    (Acceptance.BLOCK, SamplingParams(temperature=1.0), False),
]


@pytest.mark.parametrize(("acceptance", "sampling", "on_device"), CASES)
def test_verdicts_are_those_of_the_logits(
    engine: StaticEngine, acceptance: Acceptance, sampling: SamplingParams, on_device: bool
) -> None:
    tree = acceptance is Acceptance.COUPLED
    parents = (ROOT, ROOT, 0) if tree else (ROOT, 0, 1)
    proposal = Proposal(1, (4, 5, 6), (1.0, 1.0, 1.0), parents)
    round_ = Round(1, 2, ROOT, (8, 9), proposal)
    facts = SessionSpec((1, 2, 8, 9), 4, sampling, KEY, acceptance)
    behind = (-1, 0, *(parent + 2 if parent >= 0 else 1 for parent in parents))
    item = StepItem(1, 2, (8, 9, 4, 5, 6), behind, logit_rows=(1, 2, 3, 4))
    other = StepItem(2, 0, (7, 7, 7))
    for session in (1, 2):
        engine.open(session, 20)
    step(engine, StepItem(1, 0, (1, 2)))
    draw = draw_of(facts, round_, tiny.VOCAB)
    answer, nothing = engine.step_and_draw(StepPlan((item, other)), (draw,))
    assert isinstance(answer, RacedRows) == on_device
    if isinstance(answer, np.ndarray):
        verdict = verify(answer.copy(), facts, round_)
    else:
        verdict = drawn_verdict(answer, round_)
    assert isinstance(nothing, np.ndarray)
    assert nothing.shape == (0, tiny.VOCAB)
    assert verdict == verify(step(engine, item), facts, round_)
    for session in (1, 2):
        engine.close(session)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("packing.counter_of", lambda key, position: counter_of(key, position + 1)),
        ("packing.counter_of", lambda *facts: tuple(counter_of(*facts)[place] for place in (0, 1, 3, 2))),
        ("noise.words", lambda counters, vocab_size: torch.ones_like(counters[:, :1]).expand(-1, vocab_size)),
    ],
    ids=["a position too far", "seed words swapped", "no noise"],
)
def test_the_texts_catch(
    engine: StaticEngine, monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., Any]
) -> None:
    expected = plain_text(engine)
    assert drawn_text(engine) == expected
    monkeypatch.setattr(engine, "_runner", StepRunner())  # a graph would go on with what it was made of
    monkeypatch.setattr(engine, "_kernels", TORCH)
    monkeypatch.setattr(f"paceline.engine.cuda.{name}", mutant)
    assert drawn_text(engine) != expected


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 777])
def test_the_kernel_has_the_values_of_the_definition_bit_for_bit(kernel: Any, vocab_size: int) -> None:
    """Ids, lowest first among equals, and float32 of their values: ties, masks, temperatures, several blocks."""
    rng, ids = np.random.default_rng(5), np.arange(vocab_size)
    logits = np.round(rng.standard_normal((4, vocab_size)) * 3, 1).astype(np.float32)
    logits[2, 1:][rng.random(vocab_size - 1) < 0.9] = -np.inf
    logits[3] = logits[0]
    temperatures = np.array([1.0, 0.37, 0.7, 0.0], np.float32)
    positions, count = (5, 0, (1 << 32) - 1, 9), min(40, vocab_size)
    counters = on_device([counter_of(KEY, position) for position in positions])
    with np.errstate(**LIKE_A_DEVICE):
        ranked = kernel.race_candidates(on_device(logits), counters, on_device(temperatures), count)
    found = ranked.numpy(force=True)
    for row, temperature, position, candidates_ in zip(logits, temperatures, positions, found, strict=True):
        scores = row / (temperature or np.float32(1))
        values = race_values(scores, ids, *address_of(KEY, Stream.DRAFT, position, 0)).astype(np.float32)
        values = values if temperature else row
        best = np.lexsort((ids, -values))[:count]
        expected = (values[best], best, row[best])
        assert candidates_[2:].tolist() == np.concatenate(expected).tolist()
        assert candidates_[0] == row.max()
        assert candidates_[1] == pytest.approx(np.log(np.exp(scores.astype(np.float64)).sum()), abs=1e-5)


def test_other_noise_is_refused_at_the_start(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine rounds, or of lanes that are swapped."""
    philox, interleave, races = kernel.tl.philox_impl, kernel.tl.interleave, (race_candidates, kernel.race_candidates)
    for race in races:
        check_race(DEVICE, race)
    for owner, name, mutant in (
        (noise, "ROUNDS", 9),
        (kernel.tl, "philox_impl", lambda *words: philox(*words, n_rounds=9)),
        (kernel.tl, "interleave", lambda even, odd: interleave(odd, even)),
    ):
        if owner is kernel.tl and DEVICE.type != "cpu":
            continue  # a compiled kernel keeps the functions that it was made of
        with monkeypatch.context() as patch, pytest.raises(Unsupported, match="other noise"):
            patch.setattr(owner, name, mutant)
            check_race(DEVICE, races[owner is kernel.tl])


def test_an_engine_attends_and_draws_by_the_kernels(kernel: Any) -> None:
    model = tiny.random_model(tiny.llama(num_hidden_layers=1))
    engine = tiny.static(copy.deepcopy(model), kv_bytes=1 << 20, kernels="triton")
    assert engine._kernels == triton_kernels()
    plain = tiny.static(model, kv_bytes=1 << 20, kernels="torch")
    assert drawn_text(engine, tokens=6) == plain_text(plain, tokens=6)


def test_a_kernel_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("paceline.engine.cuda.race_kernel", raising=False)
    monkeypatch.delitem(sys.modules, "paceline.engine.cuda.race_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(Unsupported, match=r"kernels = triton: .*triton"):
        triton_kernels()


def test_a_device_that_rounds_otherwise_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values off by up to half the margin may only change who is a candidate. The margin is widened to see it."""
    logits = np.random.default_rng(2).standard_normal((300, 100)).astype(np.float32)
    ranking = Ranking(KEY, 1.0, tuple(range(300)), 4)
    exact, generator = noise.log_exponentials, torch.Generator(DEVICE).manual_seed(3)

    def rounded(drawn: torch.Tensor) -> torch.Tensor:
        return exact(drawn) + 0.099 * (torch.rand(drawn.shape, generator=generator, device=DEVICE) - 0.5)

    monkeypatch.setattr(noise, "log_exponentials", rounded)
    monkeypatch.setattr(candidates, "margin", lambda value: 0.1)
    found = raced(logits, ranking, 12)
    assert [each.token_ids for each in found.ranked_tokens()] == defined(logits, ranking)
    monkeypatch.setattr(candidates, "margin", lambda value: 0.0)
    assert [each.token_ids for each in found.ranked_tokens()] != defined(logits, ranking)
