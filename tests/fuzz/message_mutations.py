"""Valid messages, and mutations of them by their descriptors: fields unset, doubled, in disorder, out of limits."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from paceline.protocol import codec
from paceline.protocol.proposal import ROOT, Outcome, Proposal
from paceline.protocol.target import Prefetch
from tests.fuzz.odd_values import ODD_TEXTS
from tests.protocol.test_compatibility import STORED, parsed

_CHAIN = Proposal(0, (4, 5, 6), (1.0,) * 3)
_TREE = Proposal(0, (4, 5, 6), (1.0,) * 3, (ROOT, ROOT, 0))
FURTHER = {"target_command": [Prefetch(3, 9, ((Outcome(9, ROOT, 4), _CHAIN), (Outcome(9, 0, 7), _TREE)))]}
"""None of the stored ones has a prefetched proposal."""


@functools.cache
def stored_messages(name: str) -> tuple[Message, ...]:
    """The valid messages of one kind."""
    stored = [parsed(each) for each in STORED[name]]
    return (*stored, *(codec.encode_target_command(each) for each in FURTHER.get(name, ())))


@functools.cache
def parts_of_messages() -> tuple[Message, ...]:
    """Every message in the stored ones, their parts too: what is borrowed from."""
    return tuple(part for name in STORED for message in stored_messages(name) for part in _within(message))


def _within(message: Any) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            yield from _within(part)


_LIMITS = {
    **dict.fromkeys((Field.TYPE_INT32, Field.TYPE_SINT32, Field.TYPE_ENUM), (-(1 << 31), (1 << 31) - 1)),
    **dict.fromkeys((Field.TYPE_INT64, Field.TYPE_SINT64), (-(1 << 63), (1 << 63) - 1)),
    **dict.fromkeys((Field.TYPE_UINT32, Field.TYPE_FIXED32), (0, (1 << 32) - 1)),
    **dict.fromkeys((Field.TYPE_UINT64, Field.TYPE_FIXED64), (0, (1 << 64) - 1)),
}
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1.0, 1e-45, -1e-45, 3.4e38, 0.5, 1 + 1e-6, 100.0, 1e10)
MANY = (2, 17, 65, 300, 1100, 5000)
"""How many values a repeated field may be given: around and beyond the limits of most."""


def mutated_message(rng: random.Random, message: Message, others: Sequence[Message], most: int = 3) -> Message:
    """A copy after one to `most` mutations; `others` are what parts of equal type are taken from."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(rng.randint(1, most)):
        _mutate(rng, _inner(rng, changed), others)
    return changed


def _inner(rng: random.Random, message: Any) -> Any:
    while True:
        inside = [part for part in _parts(message) if rng.random() < 0.7]
        if not inside or rng.random() < 0.25:
            return message
        message = rng.choice(inside)


def _parts(message: Any) -> list[Any]:
    parts: list[Any] = []
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        parts.extend(value if field.is_repeated else [value])
    return parts


def _mutate(rng: random.Random, message: Any, others: Sequence[Message]) -> None:
    field = rng.choice(message.DESCRIPTOR.fields) if message.DESCRIPTOR.fields else None
    kinds: list[Callable[[random.Random, Any, Any, Sequence[Message]], None]] = [_unset, _odd, _odd, _borrowed]
    if field is not None:
        rng.choice(kinds)(rng, message, field, others)


def _unset(rng: random.Random, message: Any, field: Any, others: Sequence[Message]) -> None:
    """Leave a field out, or all of a oneof."""
    name = field.containing_oneof.name if field.containing_oneof and rng.random() < 0.5 else field.name
    message.ClearField(name)


def _odd(rng: random.Random, message: Any, field: Any, others: Sequence[Message]) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _odd_map(rng, getattr(message, field.name), field)
    elif field.is_repeated:
        _odd_list(rng, getattr(message, field.name), field)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _value(rng, field))


def _odd_list(rng: random.Random, values: Any, field: Any) -> None:
    entries = list(values)
    choice = rng.randrange(5)
    if choice == 0 and entries:
        entries.pop(rng.randrange(len(entries)))
    elif choice == 1:
        rng.shuffle(entries)
    elif choice == 2 and entries:
        entries = (entries * rng.choice(MANY))[: max(MANY)]
    elif field.message_type is not None:
        values.add()
        return
    else:
        odd = [_value(rng, field) for _ in range(rng.choice((1, 1, 1, rng.choice(MANY))))]
        place = rng.randrange(len(entries) + 1)
        entries[place : place + rng.choice((0, len(odd)))] = odd
    copies = [_copy(each) for each in entries] if field.message_type is not None else entries
    del values[:]
    values.extend(copies)


def _odd_map(rng: random.Random, values: Any, field: Any) -> None:
    keys = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    for _ in range(rng.choice((1, 1, 30, 1100))):
        key, value = (_value(rng, each) for each in keys)
        values[key] = value


def _borrowed(rng: random.Random, message: Any, field: Any, others: Sequence[Message]) -> None:
    donors = [each for each in others if each.DESCRIPTOR is message.DESCRIPTOR]
    if not donors:
        _odd(rng, message, field, others)
        return
    donor: Any = rng.choice(donors)
    if field.is_repeated:
        getattr(message, field.name).MergeFrom(getattr(donor, field.name))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(getattr(donor, field.name))
    else:
        setattr(message, field.name, getattr(donor, field.name))


def _value(rng: random.Random, field: Any) -> Any:
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.type == Field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == Field.TYPE_STRING:
        return rng.choice(ODD_TEXTS)
    if field.type == Field.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 7, 300)))
    low, high = _LIMITS[field.type]
    near = (0, 1, 2, 3, 5, 63, 64, 65, 255, 256, 4095, 4096, 65_536, 1 << 20, -1, -2)
    chosen = rng.choice((low, high, high - 1, high >> 1, *near, rng.randrange(low, high)))
    return min(max(chosen, low), high)


def _copy(message: Message) -> Message:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied
