"""How fields are copied between domain objects and messages: a table for each message, made into two functions.

The functions are written out as source and compiled once, at import, as `dataclasses` does it: rounds and verdicts
pass thousands of times per second, and loops over the same tables took 1.2 to 1.7 times as long.

How much of a message a peer may send: values of each repeated field, bytes of each text.

They are checked before anything of the message is converted. A megabyte of the wire holds half a million values, and
some of them (a drafter's name, a point of a line) cost every request that looks through them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from paceline.protocol.errors import InvalidInput, require

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


Domain = TypeVar("Domain")
Wire = TypeVar("Wire", bound=Message)


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Part:
    """How one field is converted each way, and what the message calls it if not the same."""

    encode: Callable[[Any], Any] = _as_it_is
    decode: Callable[[Any], Any] = _as_it_is
    field: str = ""


@dataclass(frozen=True)
class Copier(Generic[Domain, Wire]):
    """How one kind of domain object becomes its message, and the message the object."""

    domain: type[Domain]
    encode: Callable[[Domain], Wire]
    decode: Callable[[Wire], Domain]


_COPIERS: dict[str, Copier[Any, Any]] = {}
"""Keyed by the full name of the message."""


def register(message: type[Wire], message_copier: Copier[Domain, Wire]) -> Copier[Domain, Wire]:
    """Have fields that hold such a message copied by this copier, in every message whose own copier is made later."""
    _COPIERS[message.DESCRIPTOR.full_name] = message_copier
    return message_copier


def copier(
    domain: type[Domain],
    message: type[Wire],
    check: Callable[[Wire], None] | None = None,
    unused_fields: Collection[str] = (),
    **parts: Part,
) -> Copier[Domain, Wire]:
    """The copier between a dataclass and a message that have the same fields.

    `parts` says how single fields are converted. Of the others, a message is copied by the copier that was made for
    it before, a repeated field becomes a tuple, and any other value stays as it is. A field that is not set on the
    wire gets the dataclass's default, or where there is none the message's own. Before anything is decoded, the
    bounds are checked, then `check` sees the message. Nobody reads or sets its `unused_fields`.
    """
    wires = message.DESCRIPTOR.fields_by_name
    pairs = [(field, parts.get(field.name)) for field in fields(domain)]  # type: ignore[arg-type] # a dataclass
    names = [part.field if part and part.field else field.name for field, part in pairs]
    assert parts.keys() <= {field.name for field, _ in pairs}, f"{domain.__name__}: unknown among {sorted(parts)}"
    wire_names = set(wires) - set(unused_fields)
    assert set(names) == wire_names, f"{domain.__name__}: one side lacks {sorted(set(names) ^ wire_names)}"
    scope: dict[str, Any] = {"Domain": domain, "Message": message, "check": check, "check_bounds": check_bounds}
    reads, writes = [], []
    for name, (field, explicit_part) in zip(names, pairs, strict=True):
        part = explicit_part or _default_part(wires[name])
        decode = tuple if wires[name].is_repeated and part.decode is _as_it_is else part.decode
        has_default = wires[name].has_presence and field.default is not MISSING
        scope |= {f"read_{name}": decode, f"write_{name}": part.encode, f"default_{name}": field.default}
        reads.append(_read(name, plain=decode is _as_it_is, has_default=has_default))
        writes.append(_write(name, field.name, plain=part.encode is _as_it_is, presence=wires[name].has_presence))
    source = (
        f"def encode(value): return Message({', '.join(writes)})\n"
        f"def decode(message):\n"
        f"    if {doubt(message.DESCRIPTOR) or 'False'}: check_bounds(message)\n"
        f"    {'check(message)' if check else 'pass'}\n"
        f"    return Domain({', '.join(reads)})\n"
    )
    exec(compile(source, f"<copier of {domain.__name__}>", "exec"), scope)  # noqa: S102 - made of names only
    return register(message, Copier(domain, scope["encode"], scope["decode"]))


def _default_part(wire: Any) -> Part:
    if wire.message_type is None:
        return Part()
    message_copier = _COPIERS[wire.message_type.full_name]
    part = Part(message_copier.encode, message_copier.decode)
    return each(part) if wire.is_repeated else part


def _read(name: str, *, plain: bool, has_default: bool) -> str:
    value = f"message.{name}" if plain else f"read_{name}(message.{name})"
    return f"{value} if message.HasField('{name}') else default_{name}" if has_default else value


def _write(name: str, attribute: str, *, plain: bool, presence: bool) -> str:
    value = f"value.{attribute}"
    if plain:
        return f"{name}={value}"
    guard = f"None if {value} is None else " if presence else ""
    return f"{name}={guard}write_{name}({value})"


def each(part: Part) -> Part:
    """How a repeated field is converted, value by value."""
    return Part(lambda values: [*map(part.encode, values)], lambda values: tuple(map(part.decode, values)))


def enumeration(name: str, members: type[Enum], wire: EnumTypeWrapper) -> Part:
    """How an enum is converted; the members' names end the wire's. UNSPECIFIED and unknown numbers are refused."""
    prefix = name.upper().replace(" ", "_")
    numbers = {member: wire.Value(f"{prefix}_{member.name}") for member in members}
    by_number = {number: member for member, number in numbers.items()}

    def decode(value: int) -> Enum:
        if value not in by_number:
            raise InvalidInput.of(name, value, f"one of {sorted(by_number)}")
        return by_number[value]

    return Part(numbers.__getitem__, decode)


class OneOf(Generic[Domain, Wire]):
    """How a message with one `oneof` is copied: each of its fields is another kind of domain object.

    `encode` tries them in their order, so the most frequent should come first.
    """

    def __init__(self, name: str, message: type[Wire], kinds: Mapping[str, Copier[Any, Any]]) -> None:
        self._name = name
        self._message = message
        self._kinds = kinds
        self._oneof = message.DESCRIPTOR.oneofs[0].name
        self._writers = [(kind.domain, field, kind.encode) for field, kind in kinds.items()]

    def encode(self, value: Domain) -> Wire:
        """The message that holds the object."""
        for domain, field, encode in self._writers:
            if isinstance(value, domain):
                return self._message(**{field: encode(value)})
        raise TypeError(f"{type(value).__name__} is no {self._name}")

    def decode(self, message: Wire) -> Domain:
        """The object that the message holds, checked."""
        field = message.WhichOneof(self._oneof)
        if field is None:
            raise InvalidInput.of(self._name, field, f"one of {', '.join(self._kinds)}")
        domain_object: Domain = self._kinds[field].decode(getattr(message, field))
        return domain_object
