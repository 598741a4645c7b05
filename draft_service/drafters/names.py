"""The kinds of drafters, as configurations and sessions name them. Imports no model code, so bad names fail fast."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.proposal import MAX_DRAFTER_BYTES

MODEL = "model"


def check_drafters(drafters: Sequence[str]) -> None:
    """Refuse what names no drafter, before anything is loaded.

    Raises:
        InvalidInput: naming the value and what it may be.
    """
    if not drafters:
        raise InvalidInput.of("drafters", list(drafters), "at least 1")
    for text in drafters:
        kind, _, model = text.partition(":")
        if kind != MODEL or not model:
            raise InvalidInput.of("drafters", text, "model:NAME")
    for text in drafters[1:]:  # the first is called "model", the others by these names
        size = len(text.encode("utf-8", "surrogatepass"))
        require(size <= MAX_DRAFTER_BYTES, "drafters bytes", size, f"at most {MAX_DRAFTER_BYTES}, the first excepted")
    if len(set(drafters)) < len(drafters):
        raise InvalidInput.of("drafters", list(drafters), "named once each")
