"""The kinds of drafters, as configurations and sessions name them. Imports no model code, so bad names fail fast."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.protocol.errors import require
from paceline.protocol.handshake import MAX_DRAFTERS
from paceline.protocol.proposal import MAX_DRAFTER_BYTES, MODEL


def check_drafters(drafters: Sequence[str]) -> None:
    """Refuse what names no drafter, before anything is loaded.

    Raises:
        InvalidInput: naming the value and what it may be.
    """
    require(1 <= len(drafters) <= MAX_DRAFTERS, "drafters", len(drafters), f"in [1, {MAX_DRAFTERS}]")
    for text in drafters:
        kind, _, model = text.partition(":")
        require(kind == MODEL and model != "", "drafters", text, "model:NAME")
    for text in drafters[1:]:  # the first is called "model", too
        size = len(text.encode("utf-8", "surrogatepass"))
        require(size <= MAX_DRAFTER_BYTES, "drafters bytes", size, f"at most {MAX_DRAFTER_BYTES}, the first excepted")
    require(len(set(drafters)) == len(drafters), "drafters", list(drafters), "named once each")
