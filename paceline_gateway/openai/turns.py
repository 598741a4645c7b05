"""Messages of OpenAI's chat as the turns that chat templates read: calls of functions, results, reasoning."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.models.rendering import Turn
from paceline.protocol.errors import InvalidInput, Unsupported, require
from paceline.protocol.given_files import json_value
from paceline_gateway.http.shapes import MAX_TEXT_PARTS, parts_of, require_shallow
from paceline_gateway.openai.types import Message, ToolCall
from paceline_gateway.reply.format import CallFormat

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def template_turns(
    messages: Sequence[Message], calls: CallFormat | None, named_roles: Collection[str] = ()
) -> list[Turn]:
    """Translate a chat to turns.

    Args:
        messages: in OpenAI's shape.
        calls: how the model's template writes calls; None: it can't, and messages with calls are refused.
        named_roles: roles whose `name` the template writes; other turns have no name.

    Raises:
        InvalidInput: naming message, value and limit.
        Unsupported: a message has calls, and the template can't write them.
    """
    call_names: dict[str, str] = {}
    turns = [_turn(message, f"messages.{place}", calls, call_names) for place, message in enumerate(messages)]
    return [
        {**turn, "name": message.name} if message.name and turn["role"] in named_roles else turn
        for turn, message in zip(turns, messages, strict=True)
    ]


def _turn(message: Message, field: str, calls: CallFormat | None, call_names: dict[str, str]) -> Turn:
    role, content = message.role, message.text
    reasoning = message.reasoning_content or message.reasoning
    if role == "tool":
        return _result(message, field, call_names)
    turn: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if role == "assistant" and message.tool_calls:
        turn["tool_calls"] = _call_turns(message.tool_calls, field, calls, call_names)
    elif not content and not isinstance(message.content, str) and not (role == "assistant" and reasoning):
        parts = [part.model_dump(include={"type", "text"}) for part in message.content or ()]
        raise InvalidInput.of(f"{field}.content", parts or None, "given")
    if role == "assistant" and reasoning:
        turn["reasoning_content"] = reasoning
    return turn


def _result(message: Message, field: str, call_names: Mapping[str, str]) -> Turn:
    call_id = message.tool_call_id
    require(call_id in call_names, f"{field}.tool_call_id", call_id, "the id of a call in an earlier message")
    return {"role": "tool", "content": message.text, "tool_call_id": call_id, "name": call_names[str(call_id)]}


def _call_turns(
    calls: Sequence[ToolCall], field: str, form: CallFormat | None, call_names: dict[str, str]
) -> list[Mapping[str, Any]]:
    if form is None:
        raise Unsupported.of(f"{field}.tool_calls", "the model's chat template has none")
    turn_calls: list[Mapping[str, Any]] = []
    for place, call in enumerate(calls):
        path = f"{field}.tool_calls.{place}"
        name, arguments = call.function.name, call.function.arguments
        require(bool(call.id), f"{path}.id", call.id, "text")
        is_name = _NAME.fullmatch(name) is not None
        require(is_name, f"{path}.function.name", name, "1 to 64 letters, digits, _, . or -")
        call_names[call.id] = name
        template_arguments = arguments if form.as_text else _object_of(arguments, f"{path}.function.arguments")
        function = {"name": name, "arguments": template_arguments}
        turn_calls.append({"id": call.id, "type": call.type, "function": function})
    return turn_calls


def _object_of(arguments: str, field: str) -> Mapping[str, Any]:
    """Read arguments for a template that writes them itself: text that is no JSON can't be rendered as it was."""
    parts = parts_of(arguments.encode("utf-8", "surrogatepass"))
    require(parts <= MAX_TEXT_PARTS, f"{field} parts", parts, f"at most {MAX_TEXT_PARTS} objects, lists and fields")
    value = json_value(field, arguments or "{}")
    require(isinstance(value, dict), field, arguments, "a JSON object")
    require_shallow(field, value)
    assert isinstance(value, dict)
    return value
