"""The best ids of rows of scores, and what softmax gives them."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.errors import require
from paceline.runtime.compiled import compiled
from paceline.sampling.exponential import REORDER, exp
from paceline.sampling.racing import Scores, highest_score, insert

_STRIDE = 128
"""Scores whose maximum says whether any of them matters; chosen, not tuned."""


def largest_of_rows(scores: Scores, m: int) -> NDArray[np.intp]:
    """Ids of the m largest scores of each row in order, the lowest id first among equals.

    Args:
        scores: [n, V], none of them NaN.
        m: at least 1.

    Returns:
        [n, m]; -1 where fewer scores are above -inf.
    """
    require(m >= 1, "m", m, "at least 1")
    best = np.empty((len(scores), m), np.intp)
    _largest_of_rows(scores, best)
    return best


def shares(scores: NDArray[np.float32], ids: NDArray[np.intp], divisor: float = 1.0) -> NDArray[np.float32]:
    """Softmax of each row [n, V] over a divisor, at some of its ids [n, m]; 0 for ids below 0. Returns [n, m]."""
    out = np.empty(ids.shape, np.float32)
    _shares_of_rows(scores, np.float32(1 / divisor), ids, out)
    return out


def warm_up() -> None:
    """Compile what is compiled here (or load it from the cache), so that no request pays for it."""
    scores = np.zeros((1, 8), np.float32)
    shares(scores, largest_of_rows(scores, 2))


@compiled
def _largest_of_rows(scores: Scores, best: NDArray[np.intp]) -> None:
    for row in range(len(scores)):
        _largest(scores[row], best[row])


@compiled
def _largest(scores: Scores, best: NDArray[np.intp]) -> None:
    values = np.full(best.size, -np.inf)
    best[:] = -1
    for start in range(0, scores.size, _STRIDE):
        end = min(start + _STRIDE, scores.size)
        if highest_score(scores[start:end]) <= values[-1]:
            continue
        for i in range(start, end):
            if scores[i] > values[-1]:  # hardly ever: less than a call
                insert(values, best, np.float64(scores[i]), i)


@partial(compiled, fastmath=REORDER)
def _weight(scores: NDArray[np.float32], highest: float, scale: np.float32) -> np.float32:
    total = np.float32(0)
    for i in range(scores.size):
        total += exp((scores[i] - highest) * scale)
    return total


@compiled
def _shares_of_rows(
    scores: NDArray[np.float32], scale: np.float32, ids: NDArray[np.intp], out: NDArray[np.float32]
) -> None:
    for row in range(len(scores)):
        highest = highest_score(scores[row])
        total = _weight(scores[row], highest, scale)
        for place in range(ids.shape[1]):
            token = ids[row, place]
            out[row, place] = np.float32(0)
            if token >= 0:
                out[row, place] = np.float32(np.exp((scores[row, token] - highest) * scale) / total)
