"""One field of noise for every process: Philox integers, exponentials, and the race that draws tokens.

The field. Counter = (id >> 2, position, round key, stream | sample << 8), key = the seed's
(low, high) words, lane = id & 3, so one Philox4x32-10 block serves four global vocabulary ids.
The integers are the same on every machine; stored vectors pin them.

The race (Gumbel-max, Daliri, Musco, Suresh, arXiv 2408.07978). The token drawn from log-weights
`scores` is the id with the largest `float64(score) - log(float64(E))`, ties to the lowest id, where
E = float32(-log1p(-u)), u = (x + 0.5) / 2^32, and logarithms are libm's in float64. Excluded ids
have score -inf. This is the whole contract: the prefilter below only saves logarithms.

The prefilter. E >= u, so `score + ceiling` with ceiling >= -log u bounds an id's value from above.
One pass keeps the best exact values so far and computes only ids whose bound reaches the worst of
them: about ten a row. The ceiling reads log2 u off the float32 bits of x.

Cost at 49,152 ids on one core: 0.03 ms for a fresh row of ceilings, 0.03 ms for the race. Ceilings
are kept for a few rows, since a position is visited again after a rejection and by every branch of
a tree. Rows with few survivors compute theirs directly.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.errors import require
from paceline.protocol.sampling import NoiseKey
from paceline.runtime.compiled import compiled

Words = NDArray[np.uint32]
BLOCK = 4
"""Ids that share one Philox block."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


class Stream(IntEnum):
    """What a draw is for; streams never share an integer."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2


class Address(NamedTuple):
    """All of a counter and key but the vocabulary id."""

    position: int
    round_key: int
    tag: int
    key_low: int
    key_high: int


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 (Salmon et al., SC11) on counters [n, 4]: the reference for the compiled one."""
    low, high = np.uint64(_WORD), np.uint64(32)
    words = counter.astype(np.uint64).T
    for step in range(_ROUNDS):
        keys = [np.uint64((word + step * weyl) & _WORD) for word, weyl in zip(key, _WEYL, strict=True)]
        first, second = np.uint64(_MULTIPLIERS[0]) * words[0], np.uint64(_MULTIPLIERS[1]) * words[2]
        words = np.stack(
            [
                (second >> high) ^ words[1] ^ keys[0],
                second & low,
                (first >> high) ^ words[3] ^ keys[1],
                first & low,
            ]
        )
    return words.T.astype(np.uint32)


def random_words(key: NoiseKey, stream: Stream, position: int, vocab_size: int, round_key: int = 0) -> Words:
    """The integers x of ids 0 … V-1, by the reference. Returns [V]."""
    address = address_of(key, stream, position, round_key)
    blocks = -(-vocab_size // 4)
    counter = np.empty((blocks, 4), np.uint32)
    counter[:, 0] = np.arange(blocks)
    counter[:, 1:] = address[:3]
    return philox(counter, (address.key_low, address.key_high)).reshape(-1)[:vocab_size]


def exponentials(
    key: NoiseKey, stream: Stream, position: int, vocab_size: int, round_key: int = 0
) -> NDArray[np.float32]:
    """E of ids 0 … V-1, each Exp(1): the plain reference of the race. Returns [V]."""
    return _exponentials_of_words(random_words(key, stream, position, vocab_size, round_key))


def uniform(key: NoiseKey, stream: Stream, position: int, round_key: int = 0) -> float:
    """One uniform of 52 bits, strictly inside (0, 1): two lanes of id 0's block."""
    high, low = _first_words(*address_of(key, stream, position, round_key))
    return ((int(high) << 20 | int(low) >> 12) + 0.5) * 2.0**-52


def address_of(key: NoiseKey, stream: Stream, position: int, round_key: int) -> Address:
    """Where the draws of one stream and position stand, all ids; refuses what 32 bits can't hold."""
    require(0 <= position <= _WORD, "position", position, "in [0, 2^32)")
    require(0 <= round_key <= _WORD, "round_key", round_key, "in [0, 2^32)")
    tag = int(stream) | key.sample_index << 8
    return Address(position, round_key, tag, key.seed & _WORD, key.seed >> 32)


_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(_MULTIPLIERS[0]), np.uint64(_MULTIPLIERS[1])
_WEYL_0, _WEYL_1 = np.uint32(_WEYL[0]), np.uint32(_WEYL[1])
_SHIFT = np.uint64(32)


def _round_of(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    first = _MULTIPLIER_0 * np.uint64(c0)
    second = _MULTIPLIER_1 * np.uint64(c2)
    return (
        np.uint32(np.uint32(second >> _SHIFT) ^ c1 ^ k0),
        np.uint32(second),
        np.uint32(np.uint32(first >> _SHIFT) ^ c3 ^ k1),
        np.uint32(first),
    )


philox_round = compiled(_round_of, inlined=True)


@compiled
def philox_block(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """In compiled code: one block of four words."""
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 = np.uint32(k0 + _WEYL_0)
        k1 = np.uint32(k1 + _WEYL_1)
    return c0, c1, c2, c3


@compiled
def _first_words(position: int, round_key: int, tag: int, key_low: int, key_high: int) -> tuple[np.uint32, np.uint32]:
    c1, c2, c3 = np.uint32(position), np.uint32(round_key), np.uint32(tag)
    words = philox_block(np.uint32(0), c1, c2, c3, np.uint32(key_low), np.uint32(key_high))
    return words[0], words[1]


@compiled
def exponential_of(word: np.uint32) -> np.float32:
    """In compiled code: the Exp(1) of one word."""
    return np.float32(-math.log1p(-(np.float64(word) + 0.5) * 2.0**-32))


@compiled
def _exponentials_of_words(words: Words) -> NDArray[np.float32]:
    result = np.empty(words.size, np.float32)
    for i in range(words.size):
        result[i] = exponential_of(words[i])
    return result
