"""The tokens that a table model gives, computed without any service."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling.distribution import processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.services.harness import LAW, NOISE, SAMPLING


def next_token(history: Sequence[int], noise: NoiseKey = NOISE, sampling: SamplingParams = SAMPLING) -> int:
    """The target's own coupled token after a history."""
    scores = processed_scores(LAW.logits(history)[np.newaxis], sampling)[0]
    return race(scores, noise, Stream.DRAFT, len(history))


def own_tokens(prefix: Sequence[int], count: int, noise: NoiseKey = NOISE) -> list[int]:
    """The target-only text after a prefix."""
    history = list(prefix)
    for _ in range(count):
        history.append(next_token(history, noise))
    return history[len(prefix) :]
