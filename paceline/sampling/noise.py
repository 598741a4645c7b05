"""One field of noise for every process: Philox integers and the exponentials made of them.

Counter = (id >> 2, position, round key, stream | sample << 8), key = the seed's
(low, high) words, lane = id & 3, so one Philox4x32-10 block serves four global vocabulary ids.
The integers are the same on every machine; stored vectors pin them.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.errors import require
from paceline.protocol.sampling import NoiseKey
from paceline.runtime.compiled import compiled

Words = NDArray[np.uint32]
BLOCK = 4
"""Ids that share one Philox block."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
"""Rounds of Philox4x32-10; its multipliers and key increments stand above (Salmon et al., SC11)."""
WORD = 0xFFFFFFFF
"""The largest integer of 32 bits."""


class Stream(IntEnum):
    """The purpose of a draw; streams never share an integer."""

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


def random_words(key: NoiseKey, stream: Stream, position: int, vocab_size: int, round_key: int = 0) -> Words:
    """The integers x of ids 0 … V-1. Returns [V]."""
    return words_of_row(0, vocab_size, *address_of(key, stream, position, round_key))


def uniform(key: NoiseKey, stream: Stream, position: int, round_key: int = 0) -> float:
    """One uniform of 52 bits, strictly inside (0, 1): two lanes of id 0's block."""
    high, low = _first_words(*address_of(key, stream, position, round_key))
    return ((int(high) << 20 | int(low) >> 12) + 0.5) * 2.0**-52


def address_of(key: NoiseKey, stream: Stream, position: int, round_key: int) -> Address:
    """The address of one stream's draws at one position, for all ids; refuses numbers beyond 32 bits."""
    require(0 <= position <= WORD, "position", position, "in [0, 2^32)")
    require(0 <= round_key <= WORD, "round_key", round_key, "in [0, 2^32)")
    tag = int(stream) | key.sample_index << 8
    return Address(position, round_key, tag, key.seed & WORD, key.seed >> 32)


_MULTIPLIER_LOW, _MULTIPLIER_HIGH = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_WEYL_LOW, _WEYL_HIGH = np.uint32(WEYL[0]), np.uint32(WEYL[1])
_SHIFT = np.uint64(32)


@partial(compiled, inline=True)
def _round(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    first = _MULTIPLIER_LOW * np.uint64(c0)
    second = _MULTIPLIER_HIGH * np.uint64(c2)
    return (
        np.uint32(np.uint32(second >> _SHIFT) ^ c1 ^ k0),
        np.uint32(second),
        np.uint32(np.uint32(first >> _SHIFT) ^ c3 ^ k1),
        np.uint32(first),
    )


@compiled
def philox_block(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """In compiled code: one block of four words."""
    for _ in range(ROUNDS):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0 = np.uint32(k0 + _WEYL_LOW)
        k1 = np.uint32(k1 + _WEYL_HIGH)
    return c0, c1, c2, c3


@compiled
def _philox_blocks(c0: Words, c1: Words, c2: Words, c3: Words, n: int, k0: np.uint32, k1: np.uint32) -> None:
    """`philox_block` of n counters at once, in place."""
    for _ in range(ROUNDS):
        for i in range(n):
            c0[i], c1[i], c2[i], c3[i] = _round(c0[i], c1[i], c2[i], c3[i], k0, k1)
        k0 = np.uint32(k0 + _WEYL_LOW)
        k1 = np.uint32(k1 + _WEYL_HIGH)


LANES = 1024
"""Blocks mixed side by side: few enough for the first cache, enough to be worth setting a vector loop up.

Measured against 16 and 64 in docs/decisions/2026-11-22-rows-are-ranked-in-one-call.md.
"""


@compiled
def words_of_row(
    first_block: int, count: int, position: int, round_key: int, tag: int, key_low: int, key_high: int
) -> Words:
    """In compiled code: the integers of `count` ids from the first of a block on."""
    blocks = (count + 3) // 4
    words = np.empty((blocks, 4), np.uint32)
    c0, c1 = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
    c2, c3 = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
    for start in range(0, blocks, LANES):
        n = min(LANES, blocks - start)
        for i in range(n):
            c0[i], c1[i] = np.uint32(first_block + start + i), np.uint32(position)
            c2[i], c3[i] = np.uint32(round_key), np.uint32(tag)
        _philox_blocks(c0, c1, c2, c3, n, np.uint32(key_low), np.uint32(key_high))
        for i in range(n):
            words[start + i, 0], words[start + i, 1] = c0[i], c1[i]
            words[start + i, 2], words[start + i, 3] = c2[i], c3[i]
    return words.reshape(-1)[:count]


@compiled
def _first_words(position: int, round_key: int, tag: int, key_low: int, key_high: int) -> tuple[np.uint32, np.uint32]:
    c1, c2, c3 = np.uint32(position), np.uint32(round_key), np.uint32(tag)
    words = philox_block(np.uint32(0), c1, c2, c3, np.uint32(key_low), np.uint32(key_high))
    return words[0], words[1]


@compiled
def exponential_of(word: np.uint32) -> np.float32:
    """In compiled code: the Exp(1) of one word."""
    return np.float32(-math.log1p(-(np.float64(word) + 0.5) * 2.0**-32))
