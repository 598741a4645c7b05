"""Rank 0's commands as int64s: no pickle, and no list of fields that a new field could be missing from.

The layout of a dataclass is its fields in order: an integer, the bits of a float, the index of an enum's
member, text as its length and bytes, an optional as 0 or 1 and the value, a tuple as its length and its
members. Both ends run the same code, so the layout needs no version.
"""

from __future__ import annotations

import struct
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.engine.interface import NO_PREFIX, Draw, Prefix, StepPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Open:
    """`Engine.open`."""

    session: int
    max_rows: int
    prefix: Prefix = NO_PREFIX


@dataclass(frozen=True)
class CloseCommand:
    """`Engine.close`."""

    session: int


@dataclass(frozen=True)
class StepCommand:
    """`DrawingEngine.step_and_draw`."""

    plan: StepPlan
    draws: tuple[Draw | None, ...]


@dataclass(frozen=True)
class Beat:
    """Rank 0 lives and has nothing to do."""


@dataclass(frozen=True)
class Stop:
    """The other ranks may end."""


Command = Open | CloseCommand | StepCommand | Beat | Stop
_KINDS: tuple[type[Command], ...] = (Open, CloseCommand, StepCommand, Beat, Stop)

_Put = Callable[[Any, list[int]], None]
_Take = Callable[[Iterator[int]], Any]
_WIDE = 1 << 62
"""Marks an integer that doesn't fit, such as a seed: its two halves follow."""


def encode(command: Command) -> Ints:
    """A command as integers."""
    kind = _KINDS.index(type(command))
    out = [kind]
    _LAYOUTS[kind][0](command, out)
    return np.array(out, np.int64)


def decode(ints: Ints) -> Command:
    """The command that `encode` wrote."""
    source = iter(ints.tolist())
    command: Command = _LAYOUTS[next(source)][1](source)
    assert next(source, None) is None, "all integers of a command are read"
    return command


def _layout(kind: Any) -> tuple[_Put, _Take]:
    """The writer and the reader of a type's values.

    Raises:
        TypeError: a type without a layout, named.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        (inner,) = (each for each in arguments if each is not type(None))
        return _optional(*_layout(inner))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _many(*_layout(arguments[0]))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    if is_dataclass(kind):
        return _record(kind)
    raise TypeError(f"{kind}: has no layout in integers")


def _record(kind: Any) -> tuple[_Put, _Take]:
    hints = typing.get_type_hints(kind)
    members = [(field.name, *_layout(hints[field.name])) for field in fields(kind) if field.init]

    def put(value: Any, out: list[int]) -> None:
        for name, put_member, _ in members:
            put_member(getattr(value, name), out)

    def take(source: Iterator[int]) -> Any:
        return kind(**{name: take_member(source) for name, _, take_member in members})

    return put, take


def _many(put_one: _Put, take_one: _Take) -> tuple[_Put, _Take]:
    def put(values: Any, out: list[int]) -> None:
        out.append(len(values))
        for value in values:
            put_one(value, out)

    def take(source: Iterator[int]) -> Any:
        return tuple(take_one(source) for _ in range(next(source)))

    return put, take


def _optional(put_one: _Put, take_one: _Take) -> tuple[_Put, _Take]:
    def put(value: Any, out: list[int]) -> None:
        out.append(value is not None)
        if value is not None:
            put_one(value, out)

    def take(source: Iterator[int]) -> Any:
        return take_one(source) if next(source) else None

    return put, take


def _enum(kind: type[Enum]) -> tuple[_Put, _Take]:
    members = list(kind)
    return lambda value, out: out.append(members.index(value)), lambda source: members[next(source)]


def _put_int(value: int, out: list[int]) -> None:
    if -_WIDE < value < _WIDE:
        out.append(value)
    else:
        out += (_WIDE, value & 0xFFFFFFFF, value >> 32)


def _take_int(source: Iterator[int]) -> int:
    value = next(source)
    return value if value != _WIDE else next(source) | next(source) << 32


def _put_float(value: float, out: list[int]) -> None:
    out += struct.unpack("<q", struct.pack("<d", value))


def _take_float(source: Iterator[int]) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", next(source)))[0]
    return value


def _put_text(value: str, out: list[int]) -> None:
    text = value.encode()
    out += (len(text), *text)


def _take_text(source: Iterator[int]) -> str:
    return bytes(next(source) for _ in range(next(source))).decode()


_PLAIN: dict[Any, tuple[_Put, _Take]] = {
    int: (_put_int, _take_int),
    bool: (_put_int, lambda source: bool(next(source))),
    float: (_put_float, _take_float),
    str: (_put_text, _take_text),
}
_LAYOUTS = tuple(_layout(kind) for kind in _KINDS)
