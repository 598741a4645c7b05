"""Requests of OpenAI's Responses API, translated to its chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.protocol.errors import require
from paceline_gateway.dialects.responses_types import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputMessage,
    ReasoningItem,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
)
from paceline_gateway.dialects.translation import ChatTranslation, MessageWithPaths, assemble_chat
from paceline_gateway.http.shapes import join_text, without_nones

_SHARED_FIELDS = ("model", "temperature", "top_p", "seed", "paceline", "parallel_tool_calls", "stream")
_FUNCTION = {"name", "description", "parameters", "strict"}
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}


def chat_of_response(request: ResponsesRequest) -> ChatTranslation:
    """Translate a request.

    Raises:
        InvalidInput: naming what OpenAI's chat can't say.
    """
    text = request.input if isinstance(request.input, str) else None
    items = [InputMessage(role="user", content=text)] if text is not None else request.input
    assert not isinstance(items, str), "text has become an item"
    instructions = MessageWithPaths({"role": "system", "content": request.instructions}, {"": "instructions"})
    messages = [*([instructions] if request.instructions else []), *_messages(items)]
    require(bool(messages), "input", request.input, "at least 1 item")
    if text is not None:
        messages[-1].paths = {"": "input", "content": "input"}
    fields = {
        **{name: getattr(request, name) for name in _SHARED_FIELDS},
        "max_completion_tokens": request.max_output_tokens,
        "response_format": _response_format(request.text.format if request.text else None),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "verbosity": request.text.verbosity if request.text else None,
        "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
        "tool_choice": _tool_choice(request),
        "stream_options": {"include_usage": True} if request.stream else None,
    }
    functions = {f"tools.{place}.function": f"tools.{place}" for place in range(len(request.tools or ()))}
    return assemble_chat(without_nones(fields), messages, _NAMES | functions)


def _messages(items: Sequence[InputItem]) -> list[MessageWithPaths]:
    """Translate items; those of one answer (reasoning, text, calls) become one message, as templates render it."""
    messages: list[MessageWithPaths] = []
    answer: MessageWithPaths | None = None
    for place, item in enumerate(items):
        path = f"input.{place}"
        if isinstance(item, InputMessage) and item.role != "assistant":
            answer = None
            messages.append(MessageWithPaths({"role": item.role, "content": join_text(item.content)}, {"": path}))
        elif isinstance(item, FunctionCallOutputItem):
            answer = None
            output = {"role": "tool", "tool_call_id": item.call_id, "content": join_text(item.output)}
            paths = {"": path, "tool_call_id": f"{path}.call_id", "content": f"{path}.output"}
            messages.append(MessageWithPaths(output, paths))
        else:
            if answer is None or not _continues(answer.message, item):
                answer = MessageWithPaths({"role": "assistant", "content": None}, {"": path})
                messages.append(answer)
            _add_item(answer, item, path)
    return messages


def _continues(answer: dict[str, Any], item: InputItem) -> bool:
    """Whether an item can follow what an answer has already: reasoning, then text, then calls."""
    if isinstance(item, FunctionCallItem):
        return True
    if "tool_calls" in answer or answer["content"] is not None:
        return False
    return isinstance(item, InputMessage) or "reasoning_content" not in answer


def _add_item(answer: MessageWithPaths, item: InputItem, path: str) -> None:
    if isinstance(item, ReasoningItem):
        answer.message["reasoning_content"] = join_text(item.content)
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        answer.add_call(call, {"id": f"{path}.call_id", "function": path})
    elif isinstance(item, InputMessage):
        answer.message["content"] = join_text(item.content)
        answer.paths["content"] = f"{path}.content"


def _response_format(text_format: TextFormat | None) -> dict[str, Any] | None:
    if text_format is None:
        return None
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    schema = text_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": text_format.type, "json_schema": schema}


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(include=_FUNCTION, exclude_none=True)}


def _tool_choice(request: ResponsesRequest) -> Any:  # OpenAI's chat has text or an object there
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.name}}
