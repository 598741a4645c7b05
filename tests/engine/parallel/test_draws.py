"""Draws from shares of the vocabulary against the plain draws from whole rows; no processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.engine.interface import Draw, DrawnTokens
from paceline.engine.parallel import draws
from paceline.engine.parallel.draws import combine, draw_part, summarise, vocabulary_shares
from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round
from paceline.sampling.distribution import processed_scores, sparse_support
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race, race_part
from target_service.verifier import verify

BASE = 7
INF = np.inf


def rows(rng: np.random.Generator, count: int, vocab_size: int) -> NDArray[np.float32]:
    """Logits with ties, excluded ids and whole runs of them, flat to peaked."""
    made = rng.standard_normal((count, vocab_size)) * rng.choice([0, 0.3, 3, 30])
    made = np.round(made, int(rng.choice([0, 1, 6])))
    made[rng.random(made.shape) < rng.choice([0, 0.5, 0.95])] = -INF
    start = int(rng.integers(vocab_size))
    made[:, start : start + int(rng.integers(vocab_size))] = -INF
    made[np.arange(count), rng.integers(vocab_size, size=count)] = rng.choice([-3.0, 3.0])
    return np.asarray(made, np.float32)


def chain(rng: np.random.Generator, logits: NDArray[np.float32], acceptance: Acceptance) -> Proposal | None:
    """A proposal for all but the last row, from a distribution of its own."""
    k, vocab_size = len(logits) - 1, logits.shape[1]
    if not k:
        return None
    if acceptance is Acceptance.COUPLED or rng.random() < 0.2:
        return Proposal(1, tuple(rng.integers(vocab_size, size=k).tolist()), (1.0,) * k)
    drafted = rng.standard_normal((k, vocab_size)).astype(np.float32) * 2
    if rng.random() < 0.3:
        # q = p: nothing is left to recover from.
        drafted = processed_scores(logits[:k], SamplingParams())
    supports = tuple(sparse_support(row, max_entries=int(rng.integers(1, 9))) for row in drafted)
    tokens = tuple(int(rng.choice(support.token_ids)) for support in supports)
    q = tuple(support.probability(token) for support, token in zip(supports, tokens, strict=True))
    return Proposal(1, tokens, q, supports=supports)


def drawn_in_parts(draw: Draw, logits: NDArray[np.float32], ranks: int) -> DrawnTokens:
    """What `ranks` ranks and the two exchanges between them make."""
    shares = vocabulary_shares(draw.vocab_size, ranks)
    own = [np.ascontiguousarray(logits[:, share.start : share.stop]) for share in shares]
    summaries = np.array([summarise(draw, *each) for each in zip(own, shares, strict=True)])
    parts = np.array([draw_part(draw, *each, summaries) for each in zip(own, shares, strict=True)])
    return combine(draw, parts, summaries)


@settings(max_examples=150, deadline=None)
@given(
    acceptance=st.sampled_from(list(Acceptance)),
    ranks=st.integers(1, 6),
    vocab_size=st.sampled_from([2, 3, 5, 8, 13, 64, 130, 1000]),
    k=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.01, 0.6, 1.0, 3.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_parts_draw_what_the_whole_draws(
    acceptance: Acceptance, ranks: int, vocab_size: int, k: int, temperature: float, seed: int
) -> None:
    if acceptance is not Acceptance.COUPLED and temperature == 0:
        temperature = 0.2
    rng = np.random.default_rng(seed)
    logits = rows(rng, k + 1, vocab_size)
    round_ = Round(1, BASE, ROOT, (1,), chain(rng, logits, acceptance))
    noise = NoiseKey(seed, 3)
    facts = SessionSpec((1,) * BASE, 1, SamplingParams(temperature=temperature), noise, acceptance)
    whole = verify(logits, facts, round_)
    found = drawn_in_parts(Draw(acceptance, temperature, noise, round_, vocab_size), logits, ranks)
    assert found.token_ids == whole.token_ids
    np.testing.assert_allclose(found.target_probabilities, whole.target_probabilities, rtol=1e-12)
    np.testing.assert_allclose(found.residual_masses, whole.residual_masses, rtol=1e-9, atol=1e-12)


def test_shares_cover_the_vocabulary_in_whole_blocks() -> None:
    for vocab_size, ranks in ((1, 4), (5, 4), (97, 4), (49152, 3), (50257, 8), (24, 7)):
        shares = vocabulary_shares(vocab_size, ranks)
        assert [id_ for share in shares for id_ in range(share.start, share.stop)] == list(range(vocab_size))
        assert all(share.start % 4 == 0 for share in shares)
        assert len(shares) == ranks
    with pytest.raises(InvalidInput, match="first_id = 6"):
        race_part(np.zeros(9), 6, NoiseKey(5), Stream.DRAFT, 0)


@pytest.mark.parametrize("acceptance", [Acceptance.COUPLED, Acceptance.REJECTION, Acceptance.BLOCK])
@pytest.mark.parametrize("bad", [np.nan, INF, -INF])
def test_a_row_that_cannot_be_drawn_from_is_refused_by_rank_0(acceptance: Acceptance, bad: float) -> None:
    logits = np.zeros((2, 16), np.float32)
    if bad == -INF:
        logits[0] = bad
    else:
        logits[0, 13] = bad
    proposal = Proposal(1, (3,), (1.0,))
    draw = Draw(acceptance, 1.0, NoiseKey(5), Round(1, BASE, ROOT, (1,), proposal), 16)
    with pytest.raises(InvalidInput, match="largest logit"):
        drawn_in_parts(draw, logits, 3)


def test_noise_keyed_by_a_rank_s_own_ids_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_own_ids(scores: Any, first_id: int, *address: Any) -> tuple[float, int]:
        value, best = race_part(scores, 0, *address)
        return value, first_id + best

    monkeypatch.setattr(draws, "race_part", by_own_ids)
    logits = np.zeros((1, 64), np.float32)
    draws_of = [Draw(Acceptance.COUPLED, 1.0, NoiseKey(seed), Round(1, BASE, ROOT, (1,)), 64) for seed in range(50)]
    in_parts = [drawn_in_parts(draw, logits, 2).token_ids[0] for draw in draws_of]
    assert in_parts != [race(logits[0], draw.noise, Stream.DRAFT, BASE + 1) for draw in draws_of]
