"""The tokens that a model gives, computed without any service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling.distribution import processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.services.harness import LAW, NOISE, SAMPLING

LogitsOf = Callable[[Sequence[int]], Any]


def next_token(
    history: Sequence[int],
    noise: NoiseKey = NOISE,
    sampling: SamplingParams = SAMPLING,
    logits: LogitsOf = LAW.logits,
) -> int:
    """The target's own coupled token after a history."""
    scores = processed_scores(np.asarray(logits(history))[np.newaxis], sampling)[0]
    return race(scores, noise, Stream.DRAFT, len(history))


def own_tokens(
    prefix: Sequence[int],
    count: int,
    noise: NoiseKey = NOISE,
    sampling: SamplingParams = SAMPLING,
    logits: LogitsOf = LAW.logits,
    end: int = -1,
) -> list[int]:
    """The target-only text after a prefix, which may end with a token before."""
    history = [*prefix]
    while len(history) < len(prefix) + count and history[-1] != end:
        history.append(next_token(history, noise, sampling, logits))
    return history[len(prefix) :]
