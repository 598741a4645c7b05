"""A draft's key and the redraw of its tokens: never a false alarm, and no mistake that stays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paceline.protocol import codec
from paceline.protocol.draft import DraftedProposal
from paceline.protocol.proposal import Acceptance, Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling.distribution import processed_scores, sparse_support, support_scores
from paceline.sampling.drafted import ROUNDING, draft_key, redraw
from paceline.sampling.noise import Stream, random_words, uniform
from paceline.sampling.racing import race
from tests.sampling.field import exponentials

PRE_DRAWN = (Acceptance.REJECTION, Acceptance.BLOCK)
KEY = NoiseKey(0x1234_5678_9ABC_DEF0, 5)


def test_a_coupled_draft_shares_the_requests_noise_and_others_do_not() -> None:
    assert draft_key(KEY, Acceptance.COUPLED) == KEY
    keys = {draft_key(KEY, acceptance) for acceptance in PRE_DRAWN}
    assert keys == {NoiseKey(0x7183_9775_E99E_2C37, 5)}, "a resumed stream needs the same key in every version"
    assert len({draft_key(NoiseKey(seed), Acceptance.BLOCK).seed for seed in range(1000)}) == 1000


@pytest.mark.parametrize("stream", list(Stream))
def test_no_draw_of_the_drafts_key_is_one_of_the_requests(stream: Stream) -> None:
    """Whatever stream it computes, for whatever sample: 4,096 words at a place, of which about 0 agree."""
    own = draft_key(KEY, Acceptance.REJECTION)
    assert uniform(own, stream, 7, 3) != uniform(KEY, stream, 7, 3)
    for other in Stream:
        for sample in (0, KEY.sample_index):
            words = random_words(NoiseKey(own.seed, sample), other, 7, 4096, 3)
            assert (words == random_words(KEY, stream, 7, 4096, 3)).sum() <= 1


def samplings() -> list[SamplingParams]:
    made = [SamplingParams(temperature=t) for t in (0.0, 1e-7, 0.05, 0.7, 1.0, 5.0, 100.0)]
    return [*made, SamplingParams(top_k=7), SamplingParams(0.6, top_p=0.9), SamplingParams(1.3, 40, 0.95, 0.02)]


def travelled(proposal: Proposal) -> Proposal:
    """As the coordinator has it."""
    event = codec.encode_draft_event(DraftedProposal(1, None, proposal))
    decoded = codec.decode_draft_event(type(event).FromString(event.SerializeToString()))
    assert isinstance(decoded, DraftedProposal)
    return decoded.proposal


@pytest.mark.parametrize("size", [1, 3, 64, 257, 5000])
def test_what_was_drawn_is_redrawn(size: int) -> None:
    """Flat, peaked, masked and tied rows under every chain; the answer does not depend on what is claimed, either."""
    rng, key = np.random.default_rng(size), draft_key(KEY, Acceptance.BLOCK)
    tokens, supports = [], []
    for number in range(60):
        row = (rng.standard_normal(size) * rng.choice([0, 0.1, 3, 40])).astype(np.float32)
        row = np.round(row, int(rng.choice([0, 6])))
        if number % 3 == 0:  # a reduced vocabulary
            row[rng.random(size) < 0.7] = -np.inf
            row[rng.integers(size)] = 0
        supports.append(sparse_support(processed_scores(row[np.newaxis], samplings()[number % 10])[0]))
        tokens.append(race(support_scores(supports[-1], size), key, Stream.DRAFT, 9 + number, 8))
    q = tuple(support.probability(token) for token, support in zip(tokens, supports, strict=True))
    proposal = travelled(Proposal(1, tuple(tokens), q, supports=tuple(supports)))
    for node, (token, support) in enumerate(zip(proposal.token_ids, proposal.supports, strict=True)):
        claims = {token, support.token_ids[0], support.token_ids[-1]}
        assert {redraw(support, claimed, key, 9 + node, 8) for claimed in claims} == {token}


FLAT = SparseDistribution(tuple(range(0, 128, 2)), (1 / 64,) * 64)
Draw = Callable[[int], int]
"""The n-th draw of a series."""


def elsewhere(n: int) -> SparseDistribution:
    return sparse_support(np.random.default_rng(n).standard_normal(64).astype(np.float32))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda n: redraw(FLAT, 0, KEY, 29 + n, 20 + n),
        lambda n: redraw(FLAT, 0, KEY, 30 + n, 21 + n),
        lambda n: redraw(FLAT, 0, NoiseKey(KEY.seed, 6), 30 + n, 20 + n),
        lambda n: redraw(FLAT, 0, draft_key(KEY, Acceptance.BLOCK), 30 + n, 20 + n),
        lambda n: redraw(elsewhere(n), elsewhere(n).token_ids[0], KEY, 30 + n, 20 + n),
    ],
    ids=["position", "round", "sample", "key", "q"],
)
def test_a_draw_with_anything_else_is_seen(wrong: Draw) -> None:
    seen = sum(wrong(n) != redraw(FLAT, 0, KEY, 30 + n, 20 + n) for n in range(100))
    assert seen > 60, "two draws agree by chance now and then, of two q with the same noise more often"


@pytest.mark.parametrize(("gap", "kept"), [(ROUNDING / 4, True), (4 * ROUNDING, False)])
def test_a_tie_within_rounding_is_the_drafts_to_break(gap: float, kept: bool) -> None:
    """Another machine's logarithm may round otherwise: what it drew there is no mistake."""
    noise = exponentials(KEY, Stream.DRAFT, 30, 2, 20).astype(np.float64)
    q = noise * (1.0, 1 - gap)  # id 1 loses the race by `gap`
    support = SparseDistribution((0, 1), tuple((q / q.sum()).tolist()))
    assert redraw(support, 0, KEY, 30, 20) == 0
    assert redraw(support, 1, KEY, 30, 20) == (1 if kept else 0)
