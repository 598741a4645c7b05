"""Values that programs trip over, and mutations of JSON by its structure, and of bytes."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

Json = Any
DEPTHS = (65, 1_000, 100_000)
ODD_TEXTS = (
    "", " ", "\x00", "a" * 300, "a" * 5_000, "é漢🙂" * 40, "\u202e\ufeff\u2028", "../../etc/passwd",
    "%s%n{0}{{7*7}}", "none", "auto", "ngram", "model", "system", "assistant", "tool",
    "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "{", '{"type":"object"}', "(a+)+$", "<|im_start|>system",
)  # fmt: skip
ODD_NUMBERS: Sequence[Any] = (
    0, -1, 1, 2, 3, 20, 21, 64, 65, 128, 129, 300, 4096, 1 << 31, 1 << 32, 1 << 53, 1 << 63, 1 << 64, -(1 << 63) - 1,
    10**400, 0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
OTHERS: Sequence[Any] = (None, True, False, [], {}, [None], {"": None}, [[]], "\ud800")


def odd_json(rng: random.Random) -> Json:
    """Any JSON value, seldom the one that belongs there."""
    chosen = rng.choice((rng.choice(ODD_NUMBERS), rng.choice(ODD_TEXTS), rng.choice(OTHERS)))
    return copy.deepcopy(chosen)  # what a case changes is its own


def mutated_json(rng: random.Random, value: Json, others: Sequence[Json], most: int = 3) -> Json:
    """A copy after one to `most` mutations; `others` are what parts are taken from."""
    changed = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, most)):
        changed = _mutated(rng, changed, others)
    return changed


def _mutated(rng: random.Random, value: Json, others: Sequence[Json]) -> Json:
    places = _places(value)
    if not places:
        return odd_json(rng)
    inside, key = rng.choice(places)
    choice = rng.randrange(6)
    if choice == 0:
        del inside[key]
    elif choice == 1 and isinstance(inside, list):
        inside[key:key] = [inside[key]] * rng.choice((1, 2, 17, 130, 1100))
    elif choice == 2 and isinstance(inside, list):
        rng.shuffle(inside)
    elif choice == 3:
        _add(rng, inside)
    elif choice == 4 and others:
        inside[key] = _part(rng, rng.choice(others))
    else:
        inside[key] = odd_json(rng)
    return value


def _places(value: Json) -> list[tuple[Any, Any]]:
    entries, left = list[tuple[Any, Any]](), [value]
    while left:
        each = left.pop()
        if isinstance(each, dict | list):
            keys = list(each) if isinstance(each, dict) else range(len(each))
            entries += [(each, key) for key in keys]
            left += [each[key] for key in keys]
    return entries


def _add(rng: random.Random, inside: Any) -> None:
    if isinstance(inside, list):
        inside.append(odd_json(rng))
    else:
        for number in range(rng.choice((1, 1, 1, 1100))):
            inside[f"{rng.choice(ODD_TEXTS)}{number or ''}"] = odd_json(rng)


def _part(rng: random.Random, value: Json) -> Json:
    places = _places(value)
    part = value
    if places and rng.random() < 0.9:
        inside, key = rng.choice(places)
        part = inside[key]
    return json.loads(json.dumps(part))


def deep_json(rng: random.Random) -> bytes:
    """JSON that is nested deeper than anything follows."""
    depth = rng.choice(DEPTHS)
    return rng.choice((b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))


def nested(rng: random.Random) -> str:
    """JSON that some libraries follow and others don't: up to a thousand levels."""
    depth = rng.choice((60, 65, 120, 300, 500, 900, 980))
    return rng.choice(
        ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, '{"items":[' * depth + "]}" * depth)
    )


def deep_somewhere(rng: random.Random, value: Json) -> str:
    """The JSON of a value with one entry replaced by `nested`."""
    changed = json.loads(json.dumps(value))
    mark = "@deep@"
    if places := _places(changed):
        inside, key = rng.choice(places)
        inside[key] = mark
    else:
        changed = mark
    return json.dumps(changed).replace(f'"{mark}"', nested(rng))


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
