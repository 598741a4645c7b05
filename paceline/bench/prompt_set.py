"""The prompts of the benchmarks, by kind: one JSONL file a kind, of objects with `name` and `prompt`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from paceline.types import ChatMessage, require

KINDS = ("chat", "story", "code-edit", "copy", "summary", "json")
"""Least predictable from the prompt first."""


@dataclass(frozen=True)
class Prompt:
    """One user message."""

    kind: str
    name: str
    text: str

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The chat that a request carries."""
        return (ChatMessage("user", self.text),)


def load_prompts(kinds: Sequence[str] = KINDS) -> dict[str, tuple[Prompt, ...]]:
    """Kind → its prompts, in the order of `kinds`.

    Raises:
        InvalidInput: an unknown kind, or none.
    """
    require(len(kinds) > 0, "kind", ",".join(kinds), f"one or more of {', '.join(KINDS)}")
    for kind in kinds:
        require(kind in KINDS, "kind", kind, f"one of {', '.join(KINDS)}")
    return {kind: _read(kind) for kind in kinds}


def _read(kind: str) -> tuple[Prompt, ...]:
    text = resources.files(__package__).joinpath("prompts", f"{kind}.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return tuple(Prompt(kind, one["name"], one["prompt"]) for one in found)
