"""The race that draws tokens: Gumbel-max over shared noise, with an exact prefilter.

The definition (Daliri, Musco, Suresh, arXiv 2408.07978). The token drawn from log-weights `scores` is the id with the
largest `float64(score) - log(float64(E))`, ties to the lowest id, where E = float32(-log1p(-u)), u = (x + 0.5) / 2^32
with the id's integer x (`paceline.sampling.noise`), and logarithms are libm's in float64. Excluded ids have score
-inf. This is the whole contract: the prefilter below only saves logarithms.

The prefilter. E >= u, so `score + ceiling` with ceiling >= -log u bounds an id's value from above. One pass keeps the
best exact values so far and computes only ids whose bound reaches the worst of them: about ten a row. The ceiling
reads log2 u off the float32 bits of x.

Cost at 49,152 ids on one core: 0.03 ms for a fresh row of ceilings
(docs/decisions/2026-11-22-rows-are-ranked-in-one-call.md), 0.03 ms for the race.
Ceilings are kept for a few rows, since a position is visited again after a rejection and by every branch of a tree.
Rows with few survivors compute theirs directly.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.sampling import NoiseKey
from paceline.runtime.compiled import compiled
from paceline.sampling.noise import (
    BLOCK,
    Address,
    Stream,
    Words,
    address_of,
    exponential_of,
    philox_block,
    uniform,
    words_of_row,
)

Scores = NDArray[np.float32] | NDArray[np.float64]
"""[V] log-weights of a draw, unnormalised; -inf excludes an id."""
CACHE_BYTES = 32 << 20
"""Bound on the ceilings kept: 170 rows of 49,152 ids; chosen, not tuned."""
SHORT_ROW = 2048
"""Rows of no more ids are raced together: their noise is computed sooner than it is looked up.

Measured in docs/decisions/2026-11-22-rows-are-ranked-in-one-call.md.
"""
SPARSE_SHARE = 8
"""Rows whose survivors are at most 1/8 of the vocabulary skip the ceilings; chosen, not tuned."""


def race(scores: Scores, key: NoiseKey, stream: Stream, position: int, round_key: int = 0) -> int:
    """Draw one token from log-weights [V].

    Raises:
        InvalidInput: no score is finite, or one is NaN or +inf.
    """
    return race_best(scores, 1, key, stream, position, round_key)[0]


def race_best(
    scores: Scores, m: int, key: NoiseKey, stream: Stream, position: int, round_key: int = 0
) -> tuple[int, ...]:
    """The m best of the race in order, the drawn token first; fewer if fewer ids survive.

    Raises:
        InvalidInput: no score is finite, or one is NaN or +inf; m < 1.
    """
    require(m >= 1, "m", m, "at least 1")
    address = address_of(key, stream, position, round_key)
    largest = float(scores.max(initial=-math.inf))  # NaN if any score is
    if not math.isfinite(largest):
        raise InvalidInput.of("largest score", largest, "finite")
    return tuple(_best_places(scores, m, 0, address).tolist())


def race_rows(
    scores: Scores,
    m: int,
    key: NoiseKey,
    stream: Stream,
    positions: Sequence[int],
    round_key: int = 0,
    *,
    divisor: float = 1.0,
) -> NDArray[np.intp]:
    """`race_best` of each row of log-weights [n, V], each at a position of its own.

    Args:
        scores: [n, V].
        m: at least 1.
        key, stream, round_key: of every row.
        positions: [n].
        divisor: the log-weights are the scores over it, in the scores' own precision.

    Returns:
        [n, m]; -1 where fewer ids survive.

    Raises:
        InvalidInput: as `race_best`.
    """
    require(m >= 1, "m", m, "at least 1")
    best = np.full((len(scores), m), -1, np.intp)
    if not positions:
        return best
    if scores.shape[1] > SHORT_ROW:
        weights = scores if divisor == 1 else scores / scores.dtype.type(divisor)
        for row, (row_scores, position) in enumerate(zip(weights, positions, strict=True)):
            ids = race_best(row_scores, m, key, stream, position, round_key)
            best[row, : len(ids)] = ids
        return best
    address, _ = (address_of(key, stream, position, round_key) for position in (min(positions), max(positions)))
    denominator: Any = scores.dtype.type(divisor)
    if not _best_of_rows(scores, denominator, np.array(positions), *address[1:], best):
        require_finite("largest score", (scores / denominator).max(axis=1, initial=-math.inf))
    return best


def require_finite(name: str, largest: NDArray[np.floating]) -> None:
    """Refuse rows by their largest values [n], the first that is not finite: NaN where a row holds one.

    Raises:
        InvalidInput: with that name.
    """
    if not np.isfinite(largest).all():
        raise InvalidInput.of(name, float(largest[~np.isfinite(largest)][0]), "finite")


def race_among(
    scores: Scores, ids: NDArray[np.intp], m: int, key: NoiseKey, stream: Stream, position: int
) -> tuple[int, ...]:
    """The m best of a race in order, known to be among some ids: log-weights [n] of `ids` [n], all finite."""
    values = race_values(scores, ids, *address_of(key, stream, position, 0))
    return tuple(ids[np.lexsort((ids, -values))[:m]].tolist())


def race_part(
    scores: Scores, first_id: int, key: NoiseKey, stream: Stream, position: int, round_key: int = 0
) -> tuple[float, int]:
    """The best of a part of the vocabulary, so that parts can be raced apart and compared.

    The winner of the whole race is the part's best with the largest value, the lowest id among equals.

    Args:
        scores: log-weights of the ids first_id … first_id + n - 1.
        first_id: a multiple of 4, so that no block of noise straddles two parts.

    Returns:
        The value `score - log E` and the global id of the part's best. Where the part has no finite
        largest score: that score (-inf if nothing survives here, or the NaN or inf), and `first_id`.
    """
    require(first_id % BLOCK == 0, "first_id", first_id, f"a multiple of {BLOCK}")
    largest = float(scores.max(initial=-math.inf))  # NaN if any score is
    if not math.isfinite(largest):
        return largest, first_id
    address = address_of(key, stream, position, round_key)
    best = _best_places(scores, 1, first_id, address)
    return float(race_values(scores[best], best + first_id, *address)[0]), first_id + int(best[0])


def _best_places(scores: Scores, m: int, first_id: int, address: Address) -> NDArray[np.intp]:
    """Places in a part of the vocabulary of the m best of its race in order; fewer if fewer ids survive."""
    survivors = int(np.count_nonzero(scores > -math.inf))
    if survivors > max(m, scores.size // SPARSE_SHARE):
        best = np.empty(m, np.intp)
        _best_of_race(scores, _ceilings.row(address, first_id, scores.size), best, first_id, *address)
        return best
    places = np.flatnonzero(scores > -math.inf)
    order = np.argsort(-race_values(scores[places], places + first_id, *address), kind="stable")[:m]
    return places[order]


def warm_up() -> None:
    """Compile every kernel (or load it from the cache), so that no request pays for it."""
    key = NoiseKey(seed=0)
    uniform(key, Stream.ACCEPT, 0)
    few = np.where(np.arange(8 * SPARSE_SHARE) < 1, 0.0, -np.inf)
    race_best(few, 1, key, Stream.DRAFT, 0)
    race_best(few.astype(np.float32), 1, key, Stream.DRAFT, 0)
    race_best(np.zeros(8 * SPARSE_SHARE, np.float32), 2, key, Stream.DRAFT, 0)
    race_best(np.zeros(8 * SPARSE_SHARE, np.float64), 2, key, Stream.DRAFT, 0)
    race_rows(np.zeros((1, 8), np.float32), 2, key, Stream.DRAFT, (0,))


class _CeilingCache:
    """The latest rows of ceilings, at most `CACHE_BYTES` of them."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[Address, int, int], NDArray[np.float32]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def row(self, address: Address, first_id: int, count: int) -> NDArray[np.float32]:
        """Upper bounds on -log E of `count` ids from `first_id` on; read-only."""
        key = (address, first_id, count)
        with self._lock:
            row = self._rows.get(key)
            if row is not None:
                self._rows.move_to_end(key)
                return row
        row = np.empty(count, np.float32)
        _ceilings_of_row(row, first_id // BLOCK, *address)
        with self._lock:
            if key not in self._rows:
                self._rows[key] = row
                self._bytes += row.nbytes
            while self._bytes > CACHE_BYTES and len(self._rows) > 1:
                self._bytes -= self._rows.popitem(last=False)[1].nbytes
        return row


_ceilings = _CeilingCache()
_LN2 = np.float32(math.log(2))
_MANTISSA = np.float32(2.0**-23)
_OFFSET = np.float32(127 + 31)
_STRIDE = 128
"""Ids whose highest bound says whether any of them matters; chosen, not tuned."""
_SLACK, _RELATIVE_SLACK = 1e-3, 2.0**-22
"""Above the rounding of a bound, which `_best_of_race` derives."""


@compiled
def race_values(
    scores: Scores, ids: NDArray[np.intp], position: int, round_key: int, tag: int, key_low: int, key_high: int
) -> NDArray[np.float64]:
    """The race's values score - log E of some ids, by the contract. `scores` and `ids` are [n]."""
    c1, c2, c3 = np.uint32(position), np.uint32(round_key), np.uint32(tag)
    k0, k1 = np.uint32(key_low), np.uint32(key_high)
    values = np.empty(ids.size, np.float64)
    for i in range(ids.size):
        words = philox_block(np.uint32(ids[i] >> 2), c1, c2, c3, k0, k1)
        values[i] = np.float64(scores[i]) - math.log(np.float64(exponential_of(words[ids[i] & 3])))
    return values


@partial(compiled, fastmath={"nnan", "nsz"})
def _highest_bound(scores: Scores, ceilings: NDArray[np.float32]) -> float:
    """Largest of scores + ceilings; the caller knows that no score is NaN."""
    highest: float = scores[0] + ceilings[0]
    for i in range(1, scores.size):
        bound = scores[i] + ceilings[i]
        highest = bound if bound > highest else highest  # becomes a vector maximum
    return highest


@partial(compiled, inline=True)
def insert(values: NDArray[np.float64], best: NDArray[np.intp], value: float, index: int) -> None:
    """In compiled code: insert a value and its index among the best so far, largest first, if it belongs there."""
    place = values.size - 1
    if not value > values[place]:  # equals stay in front: they have lower ids
        return
    while place > 0 and value > values[place - 1]:
        values[place], best[place] = values[place - 1], best[place - 1]
        place -= 1
    values[place], best[place] = value, index


@compiled
def _best_of_race(
    scores: Scores,
    ceilings: NDArray[np.float32],
    best: NDArray[np.intp],
    first_id: int,
    position: int,
    round_key: int,
    tag: int,
    key_low: int,
    key_high: int,
) -> None:
    """Put indices of the m best of a row [n], the ids from `first_id` on, into `best` [m], in order.

    They are -1 where fewer survive.

    One pass, which skips what can't be among them. A bound may be too low by its rounding: 2^-24 of
    itself, 1e-5 in the ceiling, 2^-24 in E. `_SLACK` and `_RELATIVE_SLACK` are larger than their sum.
    """
    c1, c2, c3 = np.uint32(position), np.uint32(round_key), np.uint32(tag)
    k0, k1 = np.uint32(key_low), np.uint32(key_high)
    values = np.full(best.size, -np.inf)
    best[:] = -1
    for start in range(0, scores.size, _STRIDE):
        end = min(start + _STRIDE, scores.size)
        highest = np.float64(_highest_bound(scores[start:end], ceilings[start:end]))
        if highest + _SLACK + _RELATIVE_SLACK * abs(highest) < values[-1]:
            continue
        for i in range(start, end):
            bound = np.float64(scores[i] + ceilings[i])
            if bound == -np.inf or bound + _SLACK + _RELATIVE_SLACK * abs(bound) < values[-1]:
                continue
            words = philox_block(np.uint32((first_id + i) >> 2), c1, c2, c3, k0, k1)
            value = np.float64(scores[i]) - math.log(np.float64(exponential_of(words[i & 3])))
            insert(values, best, value, i)


@compiled
def _ceilings_of_words(words: Words, ceilings: NDArray[np.float32]) -> None:
    """Put upper bounds on -log E of [n] integers into `ceilings` [n].

    With w = x >> 1 as a float32 of bits b, u >= w / 2^31 and log2 w >= b / 2^23 - 127
    (log2(1 + m) >= m on the mantissa), at most 0.086 too low.
    """
    halves = np.empty(words.size, np.float32)
    for i in range(words.size):
        halves[i] = np.float32(np.int32(words[i] >> np.uint32(1)))
    bits = halves.view(np.int32)
    for i in range(words.size):
        ceilings[i] = _LN2 * (_OFFSET - _MANTISSA * np.float32(bits[i]))


@compiled
def _ceilings_of_row(
    row: NDArray[np.float32], first_block: int, position: int, round_key: int, tag: int, key_low: int, key_high: int
) -> None:
    _ceilings_of_words(words_of_row(first_block, row.size, position, round_key, tag, key_low, key_high), row)


@partial(compiled, fastmath={"nnan", "nsz"})
def highest_score(scores: Scores) -> float:
    """In compiled code: the largest of some scores; the caller knows that none is NaN, or looks for it itself."""
    highest: float = scores[0]
    for i in range(1, scores.size):
        highest = scores[i] if scores[i] > highest else highest  # becomes a vector maximum
    return highest


@compiled
def _is_finite(scores: Scores) -> bool:
    """Whether a row's largest score is finite, and none is NaN."""
    unequal = 0
    for i in range(scores.size):
        unequal += scores[i] != scores[i]
    if unequal:
        return False
    return math.isfinite(highest_score(scores))


@compiled
def _best_of_rows(
    scores: Scores,
    divisor: float,
    positions: NDArray[np.int64],
    round_key: int,
    tag: int,
    key_low: int,
    key_high: int,
    best: NDArray[np.intp],
) -> bool:
    """Put the m best of each row [n, V] over the divisor into `best` [n, m], in order; -1 where fewer survive.

    Rows at one position race the same noise, whose ceilings are most of the work. Returns whether every row could be
    raced.
    """
    count, size = scores.shape
    ceilings = np.empty((count, size), np.float32)
    weights = np.empty(size, scores.dtype)
    for row in range(count):
        for i in range(size):
            weights[i] = scores[row, i] / divisor
        if not _is_finite(weights):
            return False
        position, same = positions[row], row
        for other in range(row):
            if positions[other] == position:
                same = other
                break
        if same == row:  # into the row: to assign one would be compiled with all that its error's message needs
            _ceilings_of_row(ceilings[row], 0, position, round_key, tag, key_low, key_high)
        _best_of_race(weights, ceilings[same], best[row], 0, position, round_key, tag, key_low, key_high)
    return True
