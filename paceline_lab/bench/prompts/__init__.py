"""The prompts of the benchmarks, by kind: one JSONL file a kind.

An object has a `name` and a `prompt`, one user message, whose answer is
measured to a fixed length, its own end ignored; or `chats`, each a list of
[role, text], whose answers are short: they run one after the other to their own
ends and count as one measurement. Questions of a file of one's own: `questions`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from paceline.protocol.errors import require
from paceline.protocol.generation import ChatMessage, GenerateRequest
from paceline.protocol.sampling import SamplingParams

KINDS = ("chat", "story", "sql", "code", "code-edit", "copy", "summary", "json")
"""Least predictable from the prompt first; JSON is what a narrow draft is for."""

Chat = tuple[ChatMessage, ...]


@dataclass(frozen=True)
class Prompt:
    """One or more chats.

    Attributes:
        ends: each answer stops where it ends.
        follows: each chat goes on behind the ones before and their answers.
    """

    kind: str
    name: str
    chats: tuple[Chat, ...]
    ends: bool = False
    follows: bool = False

    def request(self, tokens: int, *, temperature: float = 0.0, seed: int = 0, **fields: Any) -> GenerateRequest:
        """Return a request of the first chat, for so many tokens: its answer's own end is ignored."""
        sampling = SamplingParams(temperature=temperature).with_defaults()
        return GenerateRequest(
            messages=self.chats[0], sampling=sampling, seed=seed, max_new_tokens=tokens, ignore_eos=True, **fields
        )

    @classmethod
    def of_json(cls, kind: str, value: Mapping[str, Any]) -> Prompt:
        """Read one line."""
        if "prompt" in value:
            return cls(kind, value["name"], ((ChatMessage("user", value["prompt"]),),))
        chats = tuple(tuple(ChatMessage(role, text) for role, text in chat) for chat in value["chats"])
        return cls(kind, value["name"], chats, ends=True)


def load_prompts(kinds: Sequence[str] = KINDS) -> dict[str, tuple[Prompt, ...]]:
    """Return the prompts of each kind, in the order of `kinds`.

    Raises:
        InvalidInput: an unknown kind, or none.
    """
    require(len(kinds) > 0, "kind", ",".join(kinds), f"one or more of {', '.join(KINDS)}")
    for kind in kinds:
        require(kind in KINDS, "kind", kind, f"one of {', '.join(KINDS)}")
    return {kind: _read(kind) for kind in kinds}


def _read(kind: str) -> tuple[Prompt, ...]:
    text = resources.files(__package__).joinpath(f"{kind}.jsonl").read_text()
    return tuple(Prompt.of_json(kind, json.loads(line)) for line in text.splitlines())
