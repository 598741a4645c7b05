"""Lists of an answer that may get long, kept as the JSON that they will be.

It takes a tenth of the memory of what it is made of, and leaves no more than joining to do at the end.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

_MARKER = re.compile(rb'"(long lists [0-9a-f]{32})"')


class LongLists:
    """An object whose lists grow; its other values are the first ones."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes so far."""
        self.marker = f"long lists {secrets.token_hex(16)}"
        """Stands for it while the answer around it is written; no client can name it."""
        self._plain: dict[str, Any] = {}
        self._lists: dict[str, list[bytes]] = {}

    def extend(self, more: Mapping[str, Any]) -> None:
        """Take another such object's lists in behind these."""
        for key, value in more.items():
            if not isinstance(value, list):
                self._plain.setdefault(key, value)
                continue
            pieces = self._lists.setdefault(key, [])
            if written := to_json(value, inf_nan_mode="null")[1:-1]:
                pieces.append(written)
                self.size += len(written) + 1

    @property
    def json(self) -> bytes:
        """All of it."""
        fields = [to_json({key: value})[1:-1] for key, value in self._plain.items()]
        lists = (to_json(key) + b":[" + b",".join(pieces) + b"]" for key, pieces in self._lists.items())
        return b"{" + b",".join((*lists, *fields)) + b"}"


def answer_json(answer: Mapping[str, Any]) -> bytes:
    """An answer that may hold such objects."""
    long: dict[bytes, LongLists] = {}

    def mark(value: object) -> str:
        assert isinstance(value, LongLists), "an answer is JSON otherwise"
        long[value.marker.encode()] = value
        return value.marker

    around = to_json(answer, inf_nan_mode="null", fallback=mark)
    if not long:
        return around
    return b"".join(long[piece].json if place % 2 else piece for place, piece in enumerate(_MARKER.split(around)))
