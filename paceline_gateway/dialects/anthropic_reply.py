"""OpenAI's chat replies as Anthropic's messages: whole, and as the events of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from paceline_gateway.dialects.translation import ChatParts, ReplyPart, cached_tokens, only_ours

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """A message for a whole chat completion of one choice."""
    choice = completion["choices"][0]
    said = choice["message"]
    blocks = [
        *([_thinking(said["reasoning_content"])] if said.get("reasoning_content") else []),
        *([{"type": "text", "text": said["content"]}] if said.get("content") else []),
        *(_use(call, cut=choice["finish_reason"] != "tool_calls") for call in said.get("tool_calls") or ()),
    ]
    message = _message(completion["id"], completion["model"], blocks, _usage(completion.get("usage")))
    return {**message, **_stop(choice), **only_ours(completion)}


def error_of(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's shape of an error.

    Args:
        status: of HTTP.
        error: OpenAI's body.
    """
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error["error"]["message"]}}


class MessageEvents:
    """Events of one stream. Each is a JSON object whose `type` is the SSE event's name, too.

    Attributes:
        input_tokens: of the prompt, for the first event; how many were cached is known at the end.
    """

    def __init__(self) -> None:
        self.input_tokens = 0
        self._parts = ChatParts()
        self._started = False
        self._index = -1
        self._open: str | None = None

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Events of a chat chunk, in its public shape."""
        events = [] if self._started else self._start(chunk)
        for part in self._parts.of(chunk):
            events += self._part(part)
        return events

    def finish(self) -> list[dict[str, Any]]:
        """Events behind the last chunk."""
        stop = _stop({"finish_reason": self._parts.finish_reason, "stop_reason": self._parts.stop_reason})
        ended = {"type": "message_delta", "delta": stop, "usage": _usage(self._parts.usage)}
        return [*self._close(), {**ended, **only_ours(self._parts.last)}, {"type": "message_stop"}]

    def fail(self, status: int, error: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Events of an error, which ends the stream: its status in HTTP, and OpenAI's body."""
        return [error_of(status, error)]

    def _start(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._started = True
        usage = {"input_tokens": self.input_tokens, "output_tokens": 0}
        return [
            {"type": "message_start", "message": _message(chunk["id"], chunk["model"], [], usage)},
            {"type": "ping"},
        ]

    def _part(self, part: ReplyPart) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if part.begins:
            events = [*self._close(), self._begin(part)]
        if part.text:
            events.append({"type": "content_block_delta", "index": self._index, "delta": _delta(part)})
        return events

    def _begin(self, part: ReplyPart) -> dict[str, Any]:
        self._index += 1
        self._open = part.kind
        block: dict[str, Any] = {"type": "text", "text": ""}
        if part.kind == "reasoning":
            block = _thinking("")
        elif part.kind == "call":
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> list[dict[str, Any]]:
        closed, self._open = self._open, None
        return [{"type": "content_block_stop", "index": self._index}] if closed else []


def _delta(part: ReplyPart) -> dict[str, str]:
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    if part.kind == "call":
        return {"type": "input_json_delta", "partial_json": part.text}
    return {"type": "text_delta", "text": part.text}


def _message(chat_id: str, model: str, content: Sequence[Any], usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{chat_id.rpartition('-')[2]}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(content),
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _stop(choice: Mapping[str, Any]) -> dict[str, Any]:
    matched = choice.get("stop_reason")
    if choice["finish_reason"] == "stop" and isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS.get(choice["finish_reason"], "end_turn"), "stop_sequence": None}


def _thinking(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _use(call: Mapping[str, Any], *, cut: bool) -> dict[str, Any]:
    """A call. One that was cut off has the keys that came whole, as clients read a stream; no JSON stays text."""
    function = call["function"]
    try:
        arguments = from_json(function["arguments"] or "{}", allow_partial=cut)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return {"type": "text", "text": f"{function['name']} {function['arguments']}"}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _usage(usage: Mapping[str, Any] | None) -> dict[str, int]:
    """Tokens that were read from a cache are counted apart, as Anthropic does."""
    counted = usage or {"prompt_tokens": 0, "completion_tokens": 0}
    cached = cached_tokens(counted)
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }
