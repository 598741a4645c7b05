"""Messages of OpenAI's chat as the turns that chat templates read: calls of functions, results, reasoning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.json_depth import require_shallow
from gateway.openai_types import Message
from gateway.reply_format import CallFormat
from gateway.unsupported import unsupported
from paceline.models.turns import Turn
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.given_files import json_value

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CALL_KEYS = ("id", "type", "function")
_FUNCTION_KEYS = ("name", "arguments")


def template_turns(messages: Sequence[Message], calls: CallFormat | None) -> list[Turn]:
    """The turns of a chat.

    Args:
        messages: in OpenAI's shape.
        calls: how the model's template writes calls; None: it can't, and messages with calls are refused.

    Raises:
        InvalidInput: naming message, value and limit.
        Unsupported: calls where the template has none.
    """
    named: dict[str, str] = {}
    return [_turn(message, f"messages.{place}", calls, named) for place, message in enumerate(messages)]


def _turn(message: Message, field: str, calls: CallFormat | None, named: dict[str, str]) -> Turn:
    role, content = message.role, message.text
    if role == "tool":
        return _result(message, field, named)
    turn: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if role == "assistant" and message.tool_calls:
        turn["tool_calls"] = _made(message.tool_calls, field, calls, named)
    elif not content and not isinstance(message.content, str):
        raise InvalidInput.of(f"{field}.content", message.model_dump()["content"], "given")
    if role == "assistant" and message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    return turn


def _result(message: Message, field: str, named: Mapping[str, str]) -> Turn:
    call_id = message.tool_call_id
    require(call_id in named, f"{field}.tool_call_id", call_id, "the id of a call in an earlier message")
    return {"role": "tool", "content": message.text, "tool_call_id": call_id, "name": named[str(call_id)]}


def _made(
    made: Sequence[Mapping[str, Any]], field: str, form: CallFormat | None, named: dict[str, str]
) -> list[Mapping[str, Any]]:
    if form is None:
        raise unsupported(f"{field}.tool_calls", "the model's chat template has none")
    turns: list[Mapping[str, Any]] = []
    for place, call in enumerate(made):
        at = f"{field}.tool_calls.{place}"
        call_id, name, arguments = _call_of(call, at)
        named[call_id] = name
        written = arguments if form.as_text else _object_of(arguments, f"{at}.function.arguments")
        turns.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": written}})
    return turns


def _call_of(call: Mapping[str, Any], at: str) -> tuple[str, str, str]:
    function = call.get("function")
    is_function = call.get("type", "function") == "function" and isinstance(function, Mapping)
    require(is_function, at, dict(call), "a call of a function")
    assert isinstance(function, Mapping)
    for place, given, known in ((at, call, _CALL_KEYS), (f"{at}.function", function, _FUNCTION_KEYS)):
        unknown = next((key for key, value in given.items() if key not in known and value is not None), None)
        require(unknown is None, place, unknown, f"without fields beside {', '.join(known)}")
    call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    require(isinstance(call_id, str) and bool(call_id), f"{at}.id", call_id, "text")
    named = isinstance(name, str) and _NAME.fullmatch(name) is not None
    require(named, f"{at}.function.name", name, "1 to 64 letters, digits, _, . or -")
    require(isinstance(arguments, str), f"{at}.function.arguments", arguments, "JSON as text")
    return str(call_id), str(name), str(arguments)


def _object_of(arguments: str, field: str) -> Mapping[str, Any]:
    """Templates write arguments themselves. Text that is no JSON can't be rendered as the model wrote it."""
    value = json_value(field, arguments or "{}")
    require(isinstance(value, dict), field, arguments, "a JSON object")
    require_shallow(field, value)
    assert isinstance(value, dict)
    return value
