"""Whose `name` a model's chat template writes: it is asked, with a name that is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.models.tokenizer import Tokenizer
from paceline.models.turns import Turn
from paceline.protocol.errors import InvalidInput, Unsupported

_NAME = "paceline_probe_name"
_USER: Turn = {"role": "user", "content": "paceline_probe_question"}
_CALL_ID = "prbAAAAA1"
_ROLES = ("system", "user", "assistant", "tool")


def named_roles(tokenizer: Tokenizer) -> frozenset[str]:
    """Roles in whose turns a name is part of the prompt."""
    return frozenset(role for role in _ROLES if any(_writes(tokenizer, turns) for turns in _probes(role)))


def _probes(role: str) -> Sequence[Sequence[Turn]]:
    named = {"role": role, "content": "paceline_probe_text", "name": _NAME}
    if role == "system":
        return ([named, _USER],)
    if role != "tool":
        return ([_USER, named][role == "user" :],)
    as_object: dict[str, str] = {}
    return [_result(named, arguments) for arguments in (as_object, "{}")]


def _result(named: Turn, arguments: Any) -> Sequence[Turn]:
    """A call and what it came to; templates want arguments as an object, or as text."""
    function = {"name": "paceline_probe_function", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [_USER, answer, {**named, "tool_call_id": _CALL_ID}]


def _writes(tokenizer: Tokenizer, turns: Sequence[Turn]) -> bool:
    try:
        return _NAME in tokenizer.template_text(turns)
    except (InvalidInput, Unsupported):
        return False
