"""Messages of OpenAI's chat as the turns that chat templates read: calls of functions, results, reasoning."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.models.turns import Turn
from paceline.protocol.errors import InvalidInput, Unsupported, require
from paceline.protocol.given_files import json_value
from paceline_gateway.http.shapes import MAX_TEXT_PARTS, parts_of, require_shallow
from paceline_gateway.openai.types import Message, ToolCall
from paceline_gateway.reply.format import CallFormat

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def template_turns(
    messages: Sequence[Message], calls: CallFormat | None, named_roles: Collection[str] = ()
) -> list[Turn]:
    """The turns of a chat.

    Args:
        messages: in OpenAI's shape.
        calls: how the model's template writes calls; None: it can't, and messages with calls are refused.
        named_roles: roles whose `name` the template writes; it is left out of the others' turns.

    Raises:
        InvalidInput: naming message, value and limit.
        Unsupported: calls where the template has none.
    """
    named: dict[str, str] = {}
    turns = [_turn(message, f"messages.{place}", calls, named) for place, message in enumerate(messages)]
    return [
        {**turn, "name": message.name} if message.name and turn["role"] in named_roles else turn
        for turn, message in zip(turns, messages, strict=True)
    ]


def _turn(message: Message, field: str, calls: CallFormat | None, named: dict[str, str]) -> Turn:
    role, content = message.role, message.text
    reasoning = message.reasoning_content or message.reasoning
    if role == "tool":
        return _result(message, field, named)
    turn: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if role == "assistant" and message.tool_calls:
        turn["tool_calls"] = _made(message.tool_calls, field, calls, named)
    elif not content and not isinstance(message.content, str) and not (role == "assistant" and reasoning):
        parts = [part.model_dump(include={"type", "text"}) for part in message.content or ()]
        raise InvalidInput.of(f"{field}.content", parts or None, "given")
    if role == "assistant" and reasoning:
        turn["reasoning_content"] = reasoning
    return turn


def _result(message: Message, field: str, named: Mapping[str, str]) -> Turn:
    call_id = message.tool_call_id
    require(call_id in named, f"{field}.tool_call_id", call_id, "the id of a call in an earlier message")
    return {"role": "tool", "content": message.text, "tool_call_id": call_id, "name": named[str(call_id)]}


def _made(
    made: Sequence[ToolCall], field: str, form: CallFormat | None, named: dict[str, str]
) -> list[Mapping[str, Any]]:
    if form is None:
        raise Unsupported.of(f"{field}.tool_calls", "the model's chat template has none")
    turns: list[Mapping[str, Any]] = []
    for place, call in enumerate(made):
        at = f"{field}.tool_calls.{place}"
        name, arguments = call.function.name, call.function.arguments
        require(bool(call.id), f"{at}.id", call.id, "text")
        is_name = _NAME.fullmatch(name) is not None
        require(is_name, f"{at}.function.name", name, "1 to 64 letters, digits, _, . or -")
        named[call.id] = name
        written = arguments if form.as_text else _object_of(arguments, f"{at}.function.arguments")
        turns.append({"id": call.id, "type": call.type, "function": {"name": name, "arguments": written}})
    return turns


def _object_of(arguments: str, field: str) -> Mapping[str, Any]:
    """Templates write arguments themselves. Text that is no JSON can't be rendered as the model wrote it."""
    parts = parts_of(arguments.encode("utf-8", "surrogatepass"))
    require(parts <= MAX_TEXT_PARTS, f"{field} parts", parts, f"at most {MAX_TEXT_PARTS} objects, lists and fields")
    value = json_value(field, arguments or "{}")
    require(isinstance(value, dict), field, arguments, "a JSON object")
    require_shallow(field, value)
    assert isinstance(value, dict)
    return value
