"""A bound on how deep JSON from outside is nested: libraries that follow it run out of stack otherwise."""

from __future__ import annotations

from paceline.protocol.errors import require

MAX_DEPTH = 64
"""Deeper than any real schema or argument; Python's own limit is near 1000 calls."""


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
