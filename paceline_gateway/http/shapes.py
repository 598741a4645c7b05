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
"""Of one object. Each that is wrong is an error of its own, and a body has room for half a million."""
UNSUPPORTED_TYPE = "unsupported_type"
"""Pydantic's name of the error for an object whose `type` is none that this server knows."""
MAX_TYPE_CHARACTERS = 64

MAX_ITEMS = 4096
"""Of one list, but for ids: as many as a chat may have messages."""
MAX_TEXT_BYTES = 64 << 10
"""Of a text that nobody reads for what it says: a name, a label, a stop string, a grammar."""
MAX_DEPTH = 64
"""Deeper than any real schema or argument; Python's own limit is near 1000 calls."""
MAX_PARTS = 1 << 17
"""Objects, lists and fields of a body, about 0.1 s: 4,096 messages have 3 each, a large schema some thousands."""
MAX_TEXT_PARTS = 1 << 13
"""Of JSON that stands in a string, as the arguments of a call do."""

Item = TypeVar("Item")
Several = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ITEMS)]
"""A list whose first wrong item is its only error: a body has room for a million."""
TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_INPUT_TOKENS)]
"""A text as ids."""


def _few_fields(values: object) -> object:
    if isinstance(values, dict) and len(values) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", "must have at most {limit} fields", {"limit": MAX_FIELDS})
    return values


Few = BeforeValidator(_few_fields)


def _given_fields(values: object) -> object:
    """Null is the same as left out, whoever knows the field."""
    values = _few_fields(values)
    return (
        {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values
    )


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "must be text that UTF-8 can hold, without half of a character"
        raise PydanticCustomError("lone_surrogate", message) from None
    return text


def _short(text: str) -> str:
    if len(_whole(text).encode()) > MAX_TEXT_BYTES:
        message = "must have at most {limit} bytes in UTF-8"
        raise PydanticCustomError("too_many_bytes", message, {"limit": MAX_TEXT_BYTES})
    return text


Prose = Annotated[str, AfterValidator(_whole)]
"""What a model reads, as long as body and context allow. JSON can name halves of characters, which nobody reads."""
Text = Annotated[str, AfterValidator(_short)]
"""Any other text."""


class RequestShape(BaseModel):
    """What every request and its parts keep: what isn't a field is refused, and JSON's types are meant."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    _has_given_fields = model_validator(mode="before")(staticmethod(_given_fields))


def of_type(kind: str, *types: str, default: str = "") -> BeforeValidator:
    """Refuses an object by the name of its type where it isn't one of these.

    Args:
        kind: what the objects are called.
        types: those that this server knows.
        default: of objects that name none.
    """

    def known(value: object) -> object:
        own = value.get("type") or default if isinstance(value, Mapping) else ""
        if isinstance(value, Mapping) and own in types:
            return {**value, "type": own}
        shown = {"kind": kind, "type": str(own)[:MAX_TYPE_CHARACTERS], "types": ", ".join(types)}
        why = "{kind} of type {type} is not supported: {types} alone" if own else "{kind} must have a type: {types}"
        raise PydanticCustomError(UNSUPPORTED_TYPE, why, shown)

    return BeforeValidator(known)


def _tag(value: object) -> str:
    return f"[{value['type']}]" if isinstance(value, Mapping) else ""


BY_TYPE = Discriminator(_tag)
"""Chooses among shapes whose `Tag` is their type in brackets, behind `of_type`."""


def _is_text(value: object) -> str:
    return "[text]" if isinstance(value, str) else "[other]"


Plain = TypeVar("Plain")
Other = TypeVar("Other")
Either = Annotated[Annotated[Plain, Tag("[text]")] | Annotated[Other, Tag("[other]")], Discriminator(_is_text)]
"""Text of some kind, or something else: an error is of the one that was sent."""
Content = Either[Prose, Several[Item]]
"""Text, or parts."""


class TextPiece(Protocol):
    """A part of a content, of whichever API."""

    @property
    def text(self) -> str:
        """What it says."""


def joined_text(content: str | Sequence[TextPiece] | None) -> str:
    """A content's text: its pieces joined, nothing between them."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(piece.text for piece in content)


def set_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that aren't left out."""
    return {name: value for name, value in fields.items() if value is not None}


def parts_of(text: bytes) -> int:
    """Objects, lists and fields of JSON, counted without reading it: exactly where they may be many."""
    if (parts := _marks(text)) <= MAX_TEXT_PARTS:
        return parts
    strings_left_out = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    return _marks(b"".join(strings_left_out))


def _marks(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[") + text.count(b":")


def require_shallow(field: str, value: object) -> None:
    """Refuse deeper nesting, found without recursion.

    Raises:
        InvalidInput: naming the field.
    """
    depth, level = 0, [value]
    while depth <= MAX_DEPTH and (level := [part for part in level if isinstance(part, dict | list)]):
        depth += 1
        level = [child for part in level for child in (part.values() if isinstance(part, dict) else part)]
    require(depth <= MAX_DEPTH, f"{field} depth", depth, f"at most {MAX_DEPTH}")
