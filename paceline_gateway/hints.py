"""Fields that can't change a text: hints, labels, what to store or cache. They are taken, ignored, and named.

Their names are those of the shapes' own fields, so they are few and short, whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel

IGNORED = "taken, and ignored"
"""Marks such a field."""
Hint = Annotated[Any, IGNORED]
"""The type of one that may have any value: nobody reads it."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def hints_of(part: object, path: str = "") -> Iterator[str]:
    """Names of the hints that a request has, without the indexes of lists: `messages.content.cache_control`."""
    if isinstance(part, list):
        if part and isinstance(part[0], int | str):
            return  # ids, a million of them
        for item in part:
            yield from hints_of(item, path)
    elif isinstance(part, BaseModel):
        fields = type(part).model_fields
        for name in part.model_fields_set:
            value = getattr(part, name)
            if IGNORED not in fields[name].metadata:
                yield from hints_of(value, f"{path}{name}.")
            elif value not in _EMPTY:
                yield f"{path}{name}"
