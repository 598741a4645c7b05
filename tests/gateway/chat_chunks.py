"""Chunks of a chat, as the gateway streams them, and official clients whose server is a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpx2

Answer = Callable[[dict[str, Any]], "dict[str, Any] | Iterable[Mapping[str, Any]]"]
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


def http_client(answer: Answer) -> httpx2.Client:
    """A client whose every request `answer` answers: with a body, or with the events of a stream."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        answered = answer(json.loads(request.content))
        if isinstance(answered, dict):
            return httpx2.Response(answered.pop("http_status", 200), json=answered)
        events = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in answered)
        return httpx2.Response(200, text=events, headers={"content-type": "text/event-stream"})

    return httpx2.Client(transport=httpx2.MockTransport(handle))
