"""Mutations of bytes: what a broken wire, a half-written file or a careless peer makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

ODD = (
    b"\x00", b"\xff", b"\x80", b"\xff" * 9 + b"\x01", b"\xff" * 12, b"\x7f\xff\xff\xff", b"\x08\x00", b"\xed\xa0\x80",
)  # fmt: skip
"""Zero, ones, varints that are overlong or end nowhere, a large length, half of a character."""
MAX_REPEATS = 4096
Mutation = Callable[[random.Random, bytes, bytes], bytes]
"""Given the choices, the bytes and others of the corpus."""


def _place(rng: random.Random, data: bytes) -> int:
    return rng.randrange(len(data) + 1)


def _slice(rng: random.Random, data: bytes) -> tuple[int, int]:
    first, last = sorted((_place(rng, data), _place(rng, data)))
    return first, last


def flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    if not data:
        return b"\x01"
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: _place(rng, data)]


def duplicate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    first, last = _slice(rng, data)
    times = rng.choice((1, 1, 2, 16, MAX_REPEATS // max(1, last - first)))
    return data[:last] + data[first:last] * times + data[last:]


def remove(rng: random.Random, data: bytes, other: bytes) -> bytes:
    first, last = _slice(rng, data)
    return data[:first] + data[last:]


def swap(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Two neighbouring slices change places: the wrong order."""
    first, last = _slice(rng, data)
    middle = (first + last) // 2
    return data[:first] + data[middle:last] + data[first:middle] + data[last:]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    first, last = _slice(rng, other)
    place = _place(rng, data)
    return data[:place] + other[first:last] + data[place + rng.choice((0, last - first)) :]


def insert(rng: random.Random, data: bytes, other: bytes) -> bytes:
    place = _place(rng, data)
    return data[:place] + rng.choice((*ODD, rng.randbytes(rng.randrange(1, 9)))) + data[place:]


MUTATIONS: Sequence[Mutation] = (flip, truncate, duplicate, remove, swap, splice, insert)


def mutated_bytes(rng: random.Random, data: bytes, other: bytes, most: int = 4) -> bytes:
    """The bytes after one to `most` mutations; `other` is what pieces are taken from."""
    for _ in range(rng.randint(1, most)):
        data = rng.choice(MUTATIONS)(rng, data, other)
    return data
