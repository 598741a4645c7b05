"""Turns of a chat in the shape that chat templates read, and how table models write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Turn = Mapping[str, Any]
"""A message or a tool as JSON, in the names of OpenAI's chat."""
Scalar = str | bool | int | float | None
"""A value of a variable that a chat template reads."""


def keys_and_strings(value: object) -> tuple[list[str], list[str]]:
    """Every key of objects in a JSON value, and every string that is none; without recursion, whatever the depth."""
    keys, strings, parts = list[str](), list[str](), [value]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            strings.append(part)
        elif isinstance(part, Mapping):
            keys.extend(part)
            parts.extend(part.values())
        elif isinstance(part, Sequence):
            parts.extend(part)
    return keys, strings


def letter_turns(turns: Sequence[Turn], tools: Sequence[Turn]) -> str:
    """A chat as table models read it: a line a turn; calls of functions as Hermes writes them."""
    tool_lines = "".join(f"tool {json.dumps(tool)}\n" for tool in tools)
    return tool_lines + "".join(f"{turn['role']}: {_turn_text(turn)}\n" for turn in turns)


def _turn_text(turn: Turn) -> str:
    calls = [call["function"] for call in turn.get("tool_calls") or ()]
    call_texts = [json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in calls]
    content = [turn["content"]] if turn.get("content") else []
    return "\n".join([*content, *(f"<tool_call>\n{call}\n</tool_call>" for call in call_texts)])
