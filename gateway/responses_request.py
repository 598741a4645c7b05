"""A request of OpenAI's Responses API as one of its chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.openai_types import joined_text
from gateway.responses_types import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputMessage,
    ReasoningItem,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
)
from paceline.protocol.errors import require


def chat_of_response(request: ResponsesRequest) -> dict[str, Any]:
    """The chat request that asks for the same.

    Raises:
        InvalidInput: naming what OpenAI's chat can't say.
    """
    items = [InputMessage(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    messages = [*instructions, *_messages(items)]
    require(bool(messages), "input", request.input, "at least 1 item")
    same = ("model", "temperature", "top_p", "seed", "paceline", "user", "parallel_tool_calls", "metadata")
    optional = {
        **{name: getattr(request, name) for name in same},
        "max_completion_tokens": request.max_output_tokens,
        "response_format": _response_format(request.text.format if request.text else None),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
        "tool_choice": _tool_choice(request),
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
    }
    return {"messages": messages, **{name: value for name, value in optional.items() if value is not None}}


def _messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Items of one answer (reasoning, text, calls) become one message, as templates render it."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, InputMessage) and item.role != "assistant":
            answer = None
            messages.append({"role": item.role, "content": joined_text(item.content)})
        elif isinstance(item, FunctionCallOutputItem):
            answer = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined_text(item.output)})
        else:
            if answer is None or not _goes_on(answer, item):
                answer = {"role": "assistant", "content": None}
                messages.append(answer)
            _add(answer, item)
    return messages


def _goes_on(answer: dict[str, Any], item: InputItem) -> bool:
    """Whether an item stands behind what an answer has already: reasoning, then text, then calls."""
    if isinstance(item, FunctionCallItem):
        return True
    if "tool_calls" in answer or answer["content"] is not None:
        return False
    return isinstance(item, InputMessage) or "reasoning_content" not in answer


def _add(answer: dict[str, Any], item: InputItem) -> None:
    if isinstance(item, ReasoningItem):
        answer["reasoning_content"] = joined_text(item.content)
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        calls = answer.setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, InputMessage):
        answer["content"] = joined_text(item.content)


def _response_format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": wanted.type, "json_schema": schema}


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(request: ResponsesRequest) -> Any:  # OpenAI's chat has text or an object there
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.name}}
