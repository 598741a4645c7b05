"""What sessions on the target and on the draft service have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.protocol.errors import require


@dataclass(frozen=True)
class Features:
    """Hidden states of accepted rows: little-endian `data` of `shape` [rows, layers, hidden]."""

    session_id: int
    first_position: int
    dtype: str
    shape: tuple[int, int, int]
    layer_ids: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Close:
    """Ends a session; harmless if it is unknown."""

    session_id: int


@dataclass(frozen=True)
class Failure:
    """One session's error inside a link; the link's other sessions go on."""

    session_id: int
    code: int
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_ms: int | None = None
    retry_safe: bool = False
    session_closed: bool = False


def check_prefix(token_ids: Sequence[int], prompt_length: int, max_length: int) -> None:
    """Refuse an empty prefix, and lengths that don't fit it."""
    require(len(token_ids) >= 1, "prefix length", len(token_ids), "at least 1 token")
    in_range = 1 <= prompt_length <= len(token_ids)
    require(in_range, "prompt_length", prompt_length, f"in [1, {len(token_ids)}]")
    long_enough = max_length == 0 or max_length >= len(token_ids)
    require(long_enough, "max_length", max_length, f"at least the prefix's {len(token_ids)} tokens, or 0")
