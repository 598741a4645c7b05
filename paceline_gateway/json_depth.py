"""Bounds on JSON from outside: how deep it is nested, for libraries that follow it, and of how much it is made.

A string of 4 MB is read in 3 ms, a million empty lists in seconds, and nothing else runs meanwhile.
"""

from __future__ import annotations

from paceline.protocol.errors import require

MAX_DEPTH = 64
"""Deeper than any real schema or argument; Python's own limit is near 1000 calls."""


MAX_PARTS = 1 << 17
"""Objects, lists and fields of a body, about 0.1 s: 4,096 messages have 3 each, a large schema some thousands."""
MAX_TEXT_PARTS = 1 << 13
"""Of JSON that stands in a string, as the arguments of a call do."""


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
