"""Shadows of a draft of another vocabulary: ranks are computed directly, too, in the target's ids and noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from draft_service.drafters.state import SessionState
from paceline.engine.vocabulary.shared import SharedVocabulary
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.sampling.distribution import processed_scores, sparse_support
from paceline.sampling.noise import Stream
from tests.engine.vocabulary.test_translated_rows import Direct, engine_of
from tests.sampling.field import exponentials
from tests.services.harness import NOISE, linked_draft
from tests.services.test_shadow import PREFIX, SAMPLINGS, shadowed

DIRECT = Direct()
LENGTH = 40
UNMAPPED = sorted({*range(DIRECT.target.vocab_size)} - {*DIRECT.shared.target_ids.tolist()})
"""The target's ids that the draft can't say."""
PLAIN = ["greedy", "T .8"]
Order = Callable[[Sequence[int], SamplingParams], list[int]]


def by_noise(ids: Sequence[int], sampling: SamplingParams) -> list[int]:
    """The target's ids after a text, as the draft ranks them under the noise that both share; those it can say."""
    scores = DIRECT.logits(ids).astype(np.float64)
    if not sampling.greedy:
        noise = exponentials(NOISE, Stream.DRAFT, len(ids), DIRECT.target.vocab_size)
        scores = scores / sampling.temperature - np.log(noise.astype(np.float64))
    order = np.argsort(-scores, kind="stable").tolist()
    return [i for i in order if np.isfinite(scores[i])]


def by_noise_of_draft_ids(ids: Sequence[int], sampling: SamplingParams) -> list[int]:
    """The same with each token's noise at the draft's id of it."""
    scores = DIRECT.logits(ids).astype(np.float64)[DIRECT.shared.target_ids]
    noise = exponentials(NOISE, Stream.DRAFT, len(ids), DIRECT.draft.vocab_size)[DIRECT.shared.draft_ids]
    raced = scores if sampling.greedy else scores / sampling.temperature - np.log(noise.astype(np.float64))
    return [int(DIRECT.shared.target_ids[each]) for each in np.argsort(-raced, kind="stable")]


def by_q(ids: Sequence[int], sampling: SamplingParams) -> list[int]:
    """In order of the draft's q alone."""
    support = sparse_support(processed_scores(DIRECT.logits(ids)[np.newaxis], sampling)[0])
    pairs = sorted(zip(support.token_ids, support.probabilities, strict=True), key=lambda pair: -pair[1])
    return [token for token, _ in pairs]


def text_of(order: Order, sampling: SamplingParams) -> list[int]:
    """A text of tokens that stand near the front of the draft's order, of any others, and of those it can't say."""
    source, ids = random.Random(3), [*PREFIX]
    while len(ids) < len(PREFIX) + LENGTH:
        chosen = source.choice(("front", "front", "any", "unmapped"))
        said = order(ids, sampling)
        ids.append(source.choice({"front": said[:3], "any": said, "unmapped": UNMAPPED}[chosen]))
    return ids


def ranks_of(order: Order, ids: list[int], sampling: SamplingParams, most: int) -> dict[int, int]:
    """By position; 0 is none of the first `most`."""
    ranks = {}
    for position in range(len(PREFIX), len(ids)):
        best = order(ids[:position], sampling)[:most]
        ranks[position] = best.index(ids[position]) + 1 if ids[position] in best else 0
    return ranks


async def shadow_ranks(ids: list[int], sampling: SamplingParams, acceptance: Acceptance) -> dict[int, int]:
    async with linked_draft(engine_of(DIRECT)) as events:
        standings = await shadowed(events, 1, ids, sampling, acceptance)
    return {position: rank for position, (rank, _) in standings.items()}


@pytest.mark.parametrize("name", PLAIN)
async def test_ranks_under_shared_noise_are_those_of_the_targets_ids(name: str) -> None:
    sampling = SAMPLINGS[name]
    ids = text_of(by_noise, sampling)
    ranks = await shadow_ranks(ids, sampling, Acceptance.COUPLED)
    assert ranks == ranks_of(by_noise, ids, sampling, SessionState.ranks)
    assert {0, 1, 2, 3} <= set(ranks.values())
    assert not any(rank for position, rank in ranks.items() if ids[position] in UNMAPPED)
    if not sampling.greedy:
        assert ranks != ranks_of(by_noise_of_draft_ids, ids, sampling, SessionState.ranks), "the noise is theirs, too"


async def test_ranks_by_q_alone_are_those_of_the_targets_ids() -> None:
    sampling = SAMPLINGS["T .8"]
    ids = text_of(by_q, sampling)
    ranks = await shadow_ranks(ids, sampling, Acceptance.REJECTION)
    assert ranks == ranks_of(by_q, ids, sampling, DIRECT.shared.size)


def unmapped(self: SharedVocabulary, logits: np.ndarray) -> np.ndarray:
    """The draft's ids, taken for the target's."""
    wide = np.full((len(logits), self.target_size), -np.inf, np.float32)
    wide[:, : logits.shape[1]] = logits
    return wide


@pytest.mark.parametrize("name", PLAIN)
async def test_the_comparison_catches_ids_that_are_not_mapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SAMPLINGS[name]
    ids = text_of(by_noise, sampling)
    monkeypatch.setattr(SharedVocabulary, "scatter", unmapped)
    ranks = await shadow_ranks(ids, sampling, Acceptance.COUPLED)
    assert ranks != ranks_of(by_noise, ids, sampling, SessionState.ranks)
