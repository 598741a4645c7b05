"""The best ids of rows of scores, and what softmax gives them.

e^x in compiled code, in float32: Cephes' expf, a polynomial that becomes vector instructions.

Right to two units in the last place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from paceline.protocol.errors import require
from paceline.runtime.compiled import compiled
from paceline.sampling.racing import Scores, highest_score, insert

REORDER = {"reassoc", "contract", "nsz", "arcp"}
"""Liberties of compiled sums that make them vector instructions; NaN and infinity are unchanged."""

_float = np.float32
_LOWEST = _float(-87.0)
"""Smaller exponents would leave float32's normal numbers; e^-87 adds nothing to 1."""


def _float_of_bits(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


_from_bits: Any = intrinsic(_float_of_bits)


@partial(compiled, fastmath=REORDER, inline=True)
def exp(x: np.float32) -> np.float32:
    """In compiled code: e^x for x <= 0."""
    x = max(x, _LOWEST)
    power = np.floor(x * _float(1.44269504) + _float(0.5))  # float32: Python's floor would lead to float64
    rest = x - power * _float(0.693359375) - power * _float(-2.12194440e-4)
    value = _float(1.9875691500e-4)
    value = value * rest + _float(1.3981999507e-3)
    value = value * rest + _float(8.3334519073e-3)
    value = value * rest + _float(4.1665795894e-2)
    value = value * rest + _float(1.6666665459e-1)
    value = value * rest + _float(5.0000001201e-1)
    value = value * rest * rest + rest + _float(1)
    scale = _from_bits(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))
    return _float(value * scale)


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
