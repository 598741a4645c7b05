"""How much of a message a peer may send: values of each repeated field, bytes of each text.

They are checked before anything of the message is converted. A megabyte of the wire holds half a million values, and
some of them (a drafter's name, a point of a line) cost every request that looks through them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline.protocol.errors import require

MAX_NAME_BYTES = 4096
"""Most bytes of a name that a peer gives: a path has no more."""
MAX_TEXT_BYTES = 1 << 18
"""Most bytes of a text for people: a quarter of a frame. A refused grammar of 64 KiB may stand in one."""


@dataclass(frozen=True)
class Most:
    """An upper bound of a field: at most `limit` values of a repeated field, or bytes of a text.

    `name` is what errors call the field. `each` bounds the bytes of each value of a repeated text. `unit` says what
    is counted, where the name does not.
    """

    limit: int
    name: str = ""
    each: int | None = None
    unit: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """A field that its message does not bound; `why` gives the reason."""

    why: str


UNREAD = Elsewhere("nobody reads it")
_BOUNDS: dict[str, Mapping[str, Most | Elsewhere]] = {}
"""Keyed by the full name of the message, then by the name of the field."""


def bound(message: type[Message], label: str, /, **fields: int | Most | Elsewhere) -> None:
    """Bound every repeated field and every text of a message; errors name a field behind the label."""
    descriptor = message.DESCRIPTOR
    names = {field.name for field in descriptor.fields if _has_size(field)}
    assert names == fields.keys(), f"{descriptor.name}: bounds and fields differ by {sorted(names ^ fields.keys())}"
    bounds = {name: _with_name(descriptor, label, name, most) for name, most in fields.items()}
    _BOUNDS[descriptor.full_name] = bounds


def bounds_of(descriptor: Any) -> Mapping[str, Most | Elsewhere]:
    """The bounds of a message's fields.

    Raises:
        KeyError: it has fields with a size, and nobody has bounded them.
    """
    if descriptor.full_name not in _BOUNDS and not any(map(_has_size, descriptor.fields)):
        return {}
    return _BOUNDS[descriptor.full_name]


def check_bounds(message: Message) -> None:
    """Refuse a message, naming the first field that is larger than its bound.

    Raises:
        InvalidInput: naming field, size and limit.
    """
    for name, most in bounds_of(message.DESCRIPTOR).items():
        if isinstance(most, Most):
            value = getattr(message, name)
            size = _size_of(value)
            require(size <= most.limit, most.name, size, f"at most {most.limit} {most.unit}".rstrip())
            if most.each is not None:
                longest = max(map(_size_of, value), default=0)
                require(longest <= most.each, f"bytes of one of {most.name}", longest, f"at most {most.each}")


def doubt(descriptor: Any) -> str:
    """Source of an expression about `message`: it is false only where `check_bounds` would pass.

    A text is measured in characters, which is fast. A character has at most 4 bytes.
    """
    doubts = []
    for name, most in bounds_of(descriptor).items():
        if isinstance(most, Most):
            field = descriptor.fields_by_name[name]
            is_text = field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated
            least = 0 if most.each is not None else most.limit // 4 if is_text else most.limit
            doubts.append(f"len(message.{name}) > {least}")
    return " or ".join(doubts)


def _size_of(value: Any) -> int:
    """How many bytes a text has, or how many values anything else has."""
    return len(value.encode()) if isinstance(value, str) else len(value)


def _has_size(field: Any) -> bool:
    return bool(field.is_repeated) or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _with_name(descriptor: Any, label: str, name: str, most: int | Most | Elsewhere) -> Most | Elsewhere:
    if isinstance(most, int):
        most = Most(most)
    if isinstance(most, Elsewhere) or most.name:
        return most
    unit = "" if descriptor.fields_by_name[name].is_repeated else " bytes"
    return replace(most, name=f"{label} {name}{unit}")
