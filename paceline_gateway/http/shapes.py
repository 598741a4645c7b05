"""What requests' shapes are made of, whichever API they belong to, and the bounds of their JSON.

A string of 4 MB is read in 3 ms, a million empty lists in seconds, and nothing else runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paceline.protocol.errors import require
from paceline.protocol.generation import MAX_INPUT_TOKENS

MAX_FIELDS = 1024
"""Most fields of one object. Each that is wrong is an error of its own, and a body has room for half a million."""
UNSUPPORTED_TYPE = "unsupported_type"
"""Pydantic's name of the error for an object whose `type` this server doesn't have."""
MAX_TYPE_CHARACTERS = 64

MAX_ITEMS = 4096
"""Most items of one list, except of ids: as many as a chat may have messages."""
MAX_TEXT_BYTES = 64 << 10
"""Longest text that isn't prose: a name, a label, a stop string, a grammar."""
MAX_DEPTH = 64
"""Deepest nesting of JSON, beyond any real schema or argument; Python's own limit is near 1000 calls."""
MAX_PARTS = 1 << 17
"""Objects, lists and fields of a body, about 0.1 s: 4,096 messages have 3 each, a large schema some thousands."""
MAX_TEXT_PARTS = 1 << 13
"""The same of JSON inside a string, such as the arguments of a call."""

Item = TypeVar("Item")
BoundedList = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ITEMS)]
"""A list whose first wrong item is its only error: a body has room for a million."""
TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_INPUT_TOKENS)]
"""A text as token ids."""


def _bounded_fields(values: object) -> object:
    if isinstance(values, dict) and len(values) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", "must have at most {limit} fields", {"limit": MAX_FIELDS})
    return values


BoundedObject = BeforeValidator(_bounded_fields)
"""Bounds the fields of an object."""


def _without_nulls(values: object) -> object:
    """Leave out null fields: null means the same, also for a field that is unknown here."""
    values = _bounded_fields(values)
    return without_nones(values) if isinstance(values, dict) else values


def _require_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "must be text that UTF-8 can hold, without half of a character"
        raise PydanticCustomError("lone_surrogate", message) from None
    return text


def _require_short(text: str) -> str:
    if len(_require_unicode(text).encode()) > MAX_TEXT_BYTES:
        message = "must have at most {limit} bytes in UTF-8"
        raise PydanticCustomError("too_many_bytes", message, {"limit": MAX_TEXT_BYTES})
    return text


Prose = Annotated[str, AfterValidator(_require_unicode)]
"""Text for the model, as long as body and context allow; JSON's halves of characters are refused."""
Text = Annotated[str, AfterValidator(_require_short)]
"""Any other text."""


class RequestShape(BaseModel):
    """Base of every request and its parts: unknown fields are refused, and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    _null_rule = model_validator(mode="before")(staticmethod(_without_nulls))


def one_of_types(kind: str, *types: str, default: str = "") -> BeforeValidator:
    """Build a validator that refuses an object by its `type`.

    Args:
        kind: what the objects are called.
        types: the types that this server has.
        default: the type of objects that name none.
    """

    def check(value: object) -> object:
        type_name = value.get("type") or default if isinstance(value, Mapping) else ""
        if isinstance(value, Mapping) and type_name in types:
            return {**value, "type": type_name}
        context = {"kind": kind, "type": str(type_name)[:MAX_TYPE_CHARACTERS], "types": ", ".join(types)}
        if not type_name:
            raise PydanticCustomError(UNSUPPORTED_TYPE, "{kind} must have a type: {types}", context)
        message = "{kind} of type {type} is not supported: {types} alone"
        raise PydanticCustomError(UNSUPPORTED_TYPE, message, context)

    return BeforeValidator(check)


def _tag(value: object) -> str:
    return f"[{value['type']}]" if isinstance(value, Mapping) else ""


TYPE_TAG = Discriminator(_tag)
"""Chooses among shapes whose `Tag` is their type in brackets; `one_of_types` comes first."""


def _is_text(value: object) -> str:
    return "[text]" if isinstance(value, str) else "[other]"


TextKind = TypeVar("TextKind")
OtherKind = TypeVar("OtherKind")
Either = Annotated[Annotated[TextKind, Tag("[text]")] | Annotated[OtherKind, Tag("[other]")], Discriminator(_is_text)]
"""Text of some kind, or something else; an error is about the kind that the client sent."""
Content = Either[Prose, BoundedList[Item]]
"""Text, or parts."""


class TextPiece(Protocol):
    """A part of a content, of whichever API."""

    @property
    def text(self) -> str:
        """The part's text."""


def join_text(content: str | Sequence[TextPiece] | None) -> str:
    """Join the pieces of a content, with nothing between them."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(piece.text for piece in content)


def without_nones(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def parts_of(text: bytes) -> int:
    """Count objects, lists and fields of JSON without reading it; the count is exact where they may be many."""
    if (parts := _marks(text)) <= MAX_TEXT_PARTS:
        return parts
    outside_strings = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    return _marks(b"".join(outside_strings))


def _marks(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[") + text.count(b":")


def require_shallow(field: str, value: object) -> None:
    """Refuse nesting deeper than `MAX_DEPTH`, without recursion.

    Raises:
        InvalidInput: naming the field.
    """
    depth, level = 0, [value]
    while depth <= MAX_DEPTH and (level := [part for part in level if isinstance(part, dict | list)]):
        depth += 1
        level = [child for part in level for child in (part.values() if isinstance(part, dict) else part)]
    require(depth <= MAX_DEPTH, f"{field} depth", depth, f"at most {MAX_DEPTH}")
