"""OpenAI's chat replies, translated to its Responses: whole, and as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from paceline_gateway.dialects.responses_types import ResponsesRequest
from paceline_gateway.dialects.translation import ChatParts, ReplyPart, cached_tokens, paceline_field

_RATE_LIMITED = 429
_COPIES = {"instructions", "max_output_tokens", "metadata", "temperature", "tools", "tool_choice", "top_p", "text"}
"""Fields of a request that its response repeats."""
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def response_of(request: ResponsesRequest, completion: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a whole chat completion of one choice."""
    choice = completion["choices"][0]
    delta = {**choice["message"]}
    delta["tool_calls"] = [{**call, "index": place} for place, call in enumerate(delta.get("tool_calls") or ())]
    events = ResponseEvents(request)
    events.feed({**completion, "choices": [{**choice, "delta": delta}]})
    response: dict[str, Any] = events.finish()[-1]["response"]
    return response


class ResponseEvents:
    """Translates one stream; each event is a JSON object whose `type` is also the SSE event's name."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self._parts = ChatParts()
        self._output: list[dict[str, Any]] = []
        self._id = ""
        self._chunk: Mapping[str, Any] = {}
        self._sequence_number = 0
        self._open_part: ReplyPart | None = None

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Translate a chat chunk, in its public shape."""
        events = [] if self._id else self._start(chunk)
        for part in self._parts.parts_of(chunk):
            events += self._part(part)
        return self._number_events(events)

    def finish(self) -> list[dict[str, Any]]:
        """Return the events behind the last chunk."""
        is_cut = self._parts.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        events = self._close(status)
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        paceline = paceline_field(self._parts.last_chunk)
        response = self._response(status, usage=_usage(self._parts.usage), **details, **paceline)
        return self._number_events([*events, {"type": f"response.{status}", "response": response}])

    def fail(self, status: int, error: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Translate an error, which ends the stream: its status in HTTP, and OpenAI's body."""
        code = "rate_limit_exceeded" if status == _RATE_LIMITED else "server_error"
        failure = {"code": code, "message": error["error"]["message"]}
        return self._number_events([{"type": "response.failed", "response": self._response("failed", error=failure)}])

    def _start(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._chunk = chunk
        self._id = chunk["id"].rpartition("-")[2]
        response = self._response("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _number_events(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        first = self._sequence_number
        self._sequence_number += len(events)
        return [{**event, "sequence_number": number} for number, event in enumerate(events, first)]

    def _part(self, part: ReplyPart) -> list[dict[str, Any]]:
        events = [*self._close("completed"), *self._begin(part)] if part.is_first else []
        if not part.text:
            return events
        item = self._output[-1]
        if part.kind == "call":
            item["arguments"] += part.text
            return [*events, self._event("response.function_call_arguments.delta", delta=part.text)]
        item["content"][0]["text"] += part.text
        extras: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        kind = f"response.{_text_name(part)}.delta"
        return [*events, self._event(kind, content_index=0, delta=part.text, **extras)]

    def _begin(self, part: ReplyPart) -> list[dict[str, Any]]:
        self._open_part = part
        item_id = f"{_PREFIXES[part.kind]}_{self._id}_{len(self._output)}"
        item = _item(part, item_id)
        self._output.append(item)
        item_added = {"type": "response.output_item.added", "output_index": self._output_index, "item": _copy(item)}
        if part.kind == "call":
            return [item_added]
        item["content"].append(_content(part))
        return [item_added, self._event("response.content_part.added", content_index=0, part=_content(part))]

    def _close(self, status: str) -> list[dict[str, Any]]:
        part, self._open_part = self._open_part, None
        if part is None:
            return []
        item = self._output[-1]
        item["status"] = status
        item_done = {"type": "response.output_item.done", "output_index": self._output_index, "item": _copy(item)}
        if part.kind == "call":
            arguments = item["arguments"]
            return [self._event("response.function_call_arguments.done", arguments=arguments), item_done]
        content = item["content"][0]
        extras: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        return [
            self._event(f"response.{_text_name(part)}.done", content_index=0, text=content["text"], **extras),
            self._event("response.content_part.done", content_index=0, part={**content}),
            item_done,
        ]

    @property
    def _output_index(self) -> int:
        return len(self._output) - 1

    def _event(self, kind: str, **extras: Any) -> dict[str, Any]:
        return {"type": kind, "output_index": self._output_index, "item_id": self._output[-1]["id"], **extras}

    def _response(self, status: str, **extras: Any) -> dict[str, Any]:
        request = self._request
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._chunk.get("created", int(time.time())),
            "status": status,
            "model": self._chunk.get("model", request.model or ""),
            "output": [_copy(item) for item in self._output],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "store": False,
            "text": {"format": {"type": "text"}},
            **request.model_dump(mode="json", by_alias=True, exclude_none=True, include=_COPIES),
            **extras,
        }


def _text_name(part: ReplyPart) -> str:
    return "reasoning_text" if part.kind == "reasoning" else "output_text"


def _item(part: ReplyPart, item_id: str) -> dict[str, Any]:
    common = {"id": item_id, "status": "in_progress"}
    if part.kind == "reasoning":
        return {**common, "type": "reasoning", "summary": [], "content": []}
    if part.kind == "call":
        return {**common, "type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
    return {**common, "type": "message", "role": "assistant", "content": []}


def _content(part: ReplyPart) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an item as it is now, so that an event doesn't grow behind its sending."""
    return {**item, **({"content": [{**part} for part in item["content"]]} if "content" in item else {})}


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    reasoning_tokens = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached_tokens(usage), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
    }
