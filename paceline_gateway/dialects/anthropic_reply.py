"""OpenAI's chat replies, translated to Anthropic's messages: whole, and as the events of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from paceline_gateway.dialects.translation import ChatParts, ReplyPart, cached_tokens, paceline_field

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
    """Translate a whole chat completion of one choice."""
    choice = completion["choices"][0]
    reply = choice["message"]
    blocks = [
        *([_thinking(reply["reasoning_content"])] if reply.get("reasoning_content") else []),
        *([{"type": "text", "text": reply["content"]}] if reply.get("content") else []),
        *(_tool_use(call, is_cut=choice["finish_reason"] != "tool_calls") for call in reply.get("tool_calls") or ()),
    ]
    message = _message(completion["id"], completion["model"], blocks, _usage(completion.get("usage")))
    return {**message, **_stop(choice), **paceline_field(completion)}


def error_of(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error in Anthropic's shape.

    Args:
        status: the HTTP status.
        error: OpenAI's body.
    """
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error["error"]["message"]}}


class MessageEvents:
    """Translates one stream; each event is a JSON object whose `type` is also the SSE event's name.

    Attributes:
        input_tokens: the prompt's tokens, for the first event; the last one has the cached tokens, too.
    """

    def __init__(self) -> None:
        self.input_tokens = 0
        self._parts = ChatParts()
        self._has_started = False
        self._index = -1
        self._open_part: str | None = None

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Translate a chat chunk, in its public shape."""
        events = [] if self._has_started else self._start(chunk)
        for part in self._parts.parts_of(chunk):
            events += self._part(part)
        return events

    def finish(self) -> list[dict[str, Any]]:
        """Return the events behind the last chunk."""
        stop = _stop({"finish_reason": self._parts.finish_reason, "stop_reason": self._parts.stop_reason})
        final_delta = {"type": "message_delta", "delta": stop, "usage": _usage(self._parts.usage)}
        return [*self._close(), {**final_delta, **paceline_field(self._parts.last_chunk)}, {"type": "message_stop"}]

    def fail(self, status: int, error: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Translate an error, which ends the stream: its status in HTTP, and OpenAI's body."""
        return [error_of(status, error)]

    def _start(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._has_started = True
        usage = {"input_tokens": self.input_tokens, "output_tokens": 0}
        return [
            {"type": "message_start", "message": _message(chunk["id"], chunk["model"], [], usage)},
            {"type": "ping"},
        ]

    def _part(self, part: ReplyPart) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if part.is_first:
            events = [*self._close(), self._begin(part)]
        if part.text:
            events.append({"type": "content_block_delta", "index": self._index, "delta": _delta(part)})
        return events

    def _begin(self, part: ReplyPart) -> dict[str, Any]:
        self._index += 1
        self._open_part = part.kind
        block: dict[str, Any] = {"type": "text", "text": ""}
        if part.kind == "reasoning":
            block = _thinking("")
        elif part.kind == "call":
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> list[dict[str, Any]]:
        part, self._open_part = self._open_part, None
        return [{"type": "content_block_stop", "index": self._index}] if part else []


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
    stop_string = choice.get("stop_reason")
    if choice["finish_reason"] == "stop" and isinstance(stop_string, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": _STOP_REASONS.get(choice["finish_reason"], "end_turn"), "stop_sequence": None}


def _thinking(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call: Mapping[str, Any], *, is_cut: bool) -> dict[str, Any]:
    """Translate a call.

    A call that was cut off has the keys that came whole, as clients read a stream. Other text than JSON stays text.
    """
    function = call["function"]
    try:
        arguments = from_json(function["arguments"] or "{}", allow_partial=is_cut)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return {"type": "text", "text": f"{function['name']} {function['arguments']}"}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _usage(usage: Mapping[str, Any] | None) -> dict[str, int]:
    """Translate usage; Anthropic counts cached tokens apart."""
    counts = usage or {"prompt_tokens": 0, "completion_tokens": 0}
    cache_tokens = cached_tokens(counts)
    return {
        "input_tokens": counts["prompt_tokens"] - cache_tokens,
        "cache_read_input_tokens": cache_tokens,
        "output_tokens": counts["completion_tokens"],
    }
