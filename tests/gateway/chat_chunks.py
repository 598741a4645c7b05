"""Chunks of a chat, as the gateway streams them, and whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}


def chunk(delta: Mapping[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": dict(delta), "finish_reason": finish_reason, **more}
    return {"id": "chatcmpl-7f", "model": "m", "created": 7, "choices": [choice]}


def call(index: int, name: str = "", arguments: str = "") -> dict[str, Any]:
    named = {"id": f"call{index}", "type": "function"} if name else {}
    return {"tool_calls": [{"index": index, **named, "function": {"name": name or None, "arguments": arguments}}]}


def ended(*deltas: Mapping[str, Any], reason: str = "stop", **more: Any) -> list[dict[str, Any]]:
    """A whole stream: a role, the deltas, a reason, and what it took."""
    last = {"id": "chatcmpl-7f", "model": "m", "created": 7, "choices": [], "usage": USAGE}
    return [chunk({"role": "assistant", "content": ""}), *map(chunk, deltas), chunk({}, reason, **more), last]


def completion(message: Mapping[str, Any], reason: str = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason, **more}
    return {"id": "chatcmpl-7f", "model": "m", "created": 7, "choices": [choice], "usage": USAGE}
