"""The best ids of rows of scores, and what softmax gives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.compiled import compiled
from paceline.noise import Scores, insert
from paceline.types import require

_STRIDE = 128
"""Scores whose maximum says whether any of them matters."""


def largest_ids(scores: Scores, m: int) -> tuple[int, ...]:
    """Ids of the m largest scores in order, the lowest id first among equals; fewer if fewer are above -inf.

    Args:
        scores: [V], none of them NaN.
        m: at least 1.
    """
    require(m >= 1, "m", m, "at least 1")
    found = _largest(scores, m)
    return tuple(found[found >= 0].tolist())


def shares(scores: NDArray[np.float32], ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """Softmax of some ids of each row [n, V], in float32."""
    with np.errstate(over="ignore"):  # so far below that nothing is left
        weights = scores - scores.max(axis=1, keepdims=True)
    np.exp(weights, out=weights)
    sums = weights.sum(axis=1)
    return [(row[list(of)] / total).tolist() for row, of, total in zip(weights, ids, sums, strict=True)]


def warm_up() -> None:
    """Compile what is compiled here (or load it from the cache), so that no request pays for it."""
    largest_ids(np.zeros(8, np.float32), 2)


def _highest_of(scores: Scores) -> float:
    highest: float = scores[0]
    for i in range(1, scores.size):
        highest = scores[i] if scores[i] > highest else highest  # becomes a vector maximum
    return highest


_highest = compiled(_highest_of, fastmath={"nnan", "nsz"})


@compiled
def _largest(scores: Scores, m: int) -> NDArray[np.intp]:
    values = np.full(m, -np.inf)
    best = np.full(m, -1, np.intp)
    for start in range(0, scores.size, _STRIDE):
        end = min(start + _STRIDE, scores.size)
        if _highest(scores[start:end]) <= values[m - 1]:
            continue
        for i in range(start, end):
            if scores[i] > values[m - 1]:  # hardly ever: less than a call
                insert(values, best, np.float64(scores[i]), i)
    return best
