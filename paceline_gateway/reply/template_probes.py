"""What a model's chat template writes: it is asked, with names and values that are known beforehand.

A call with such names is rendered by the template itself; what stands around them is the format. So no list of models
is needed, and a grammar can be written in the template's own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from paceline.models.reasoning import TAGS, template_tags
from paceline.models.tokenizer import Tokenizer
from paceline.models.turns import Turn
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline_gateway.reply.format import OPENING_OBJECT, CallFormat, ParameterFormat, ReasoningTags, ReplyFormat

_NAMES = ("paceline_probe_one", "paceline_probe_two")
_ARGUMENTS = {"probe_key": "probe_value"}
_FURTHER = {"probe_other": "probe_third"}
_IDS = ("prbAAAAA1", "prbAAAAA2")
"""Nine letters and digits: Mistral's templates take no others."""
_USER: Turn = {"role": "user", "content": "paceline_probe_question"}
_SAID = "paceline_probe_answer"
_USER_NAME = "paceline_probe_name"
_ROLES = ("system", "user", "assistant", "tool")


def read_reply_format(tokenizer: Tokenizer) -> ReplyFormat:
    """Have the template write calls and an answer's start, and look at them; some milliseconds, once a model."""
    try:
        calls, why = _read_calls(tokenizer), ""
    except Unsupported as error:
        calls, why = None, error.message
    tags = template_tags(tokenizer)
    reasoning = ReasoningTags(*tags) if tags else None
    marks = [reasoning.opening, reasoning.closing] if reasoning else []
    if calls:
        marks += [*calls.markers, calls.opening, calls.between, calls.following or "", calls.closing]
        marks += [calls.each.before_name, calls.each.before_value, calls.each.behind_value] if calls.each else []
    hidden = {i: text for i, text in tokenizer.hidden_tokens.items() if any(text in mark for mark in marks)}
    ends = {text for i, text in hidden.items() if i in tokenizer.eos_token_ids}
    kept = {i: text for i, text in hidden.items() if text not in ends}
    return ReplyFormat(calls, why, reasoning, dict(tokenizer.added_tokens), kept)


def _read_calls(tokenizer: Tokenizer) -> CallFormat:
    tools = [_tool(name) for name in _NAMES]
    try:
        with_tools = tokenizer.template_text([_USER], tools)
    except InvalidInput as error:
        raise Unsupported(f"the model's chat template refuses them ({error.message})") from error
    if _NAMES[0] not in with_tools:
        raise Unsupported("the model's chat template has none")
    for as_text in (False, True):
        one = _answer(tokenizer, tools, 1, as_text=as_text)
        if one is not None and _NAMES[0] in one:
            two = _answer(tokenizer, tools, 2, as_text=as_text)
            found = None if as_text else _one_by_one(tokenizer, tools, two)
            return found or _taken_apart(one, two, tokenizer, as_text=as_text)
    raise Unsupported("the model's chat template can't write a call")


def _answer(
    tokenizer: Tokenizer,
    tools: Sequence[Turn],
    count: int,
    given: Mapping[str, str] = _ARGUMENTS,
    *,
    as_text: bool = False,
) -> str | None:
    """What the template writes for an answer of so many calls; None: it refuses, or the answer isn't found."""
    arguments: Any = json.dumps(given) if as_text else given
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name in zip(_IDS[:count], _NAMES, strict=False)
    ]
    try:
        said, called = (
            tokenizer.template_text([_USER, {"role": "assistant", **answer}], tools, answer_follows=False)
            for answer in ({"content": _SAID}, {"content": "", "tool_calls": calls})
        )
    except InvalidInput:
        return None
    header = _before_reasoning(said.partition(_SAID)[0])
    return called[len(header) :] if called.startswith(header) else None


def _before_reasoning(header: str) -> str:
    """An answer's header without the empty span of reasoning that templates write in front of the last answer."""
    behind = max(0, header.rfind(_USER["content"]))
    starts = (header.find(opening, behind) for opening, _ in TAGS)
    return header[: min((at for at in starts if at >= 0), default=len(header))].rstrip()


def _taken_apart(one: str, two: str | None, tokenizer: Tokenizer, *, as_text: bool) -> CallFormat:
    pieces = re.split(f"{_NAMES[0]}|{_arguments_pattern()}", one)
    if len(pieces) != 3:
        raise Unsupported("the model's chat template writes calls in a format that isn't known")
    opening, between, rest = (_without_ids(piece) for piece in pieces)
    opening = _behind_reasoning(opening)
    closing = _to_end(rest, tokenizer)
    shape = OPENING_OBJECT.search(opening)
    marker = (opening[: shape.start()] if shape else opening).strip()
    if not shape and not marker:
        raise Unsupported("the model's chat template writes calls in a format that isn't known")
    return CallFormat(marker, opening, between, _following(two), closing.rstrip("\n"), as_text)


def _one_by_one(tokenizer: Tokenizer, tools: Sequence[Turn], two: str | None) -> CallFormat | None:
    """The format, if the template writes arguments one by one; `two` has two calls."""
    none, both = (_answer(tokenizer, tools, 1, arguments) for arguments in ({}, _ARGUMENTS | _FURTHER))
    if none is None or both is None:
        return None
    (opening, _, none), (_, _, both) = none.partition(_NAMES[0]), both.partition(_NAMES[0])
    probes = [text for pair in (_ARGUMENTS | _FURTHER).items() for text in pair]
    written = read_arguments(_to_end(none, tokenizer), _to_end(both, tokenizer), probes)
    opening = _behind_reasoning(opening)
    if written is None or not opening.strip():
        return None
    _, _, behind = (two or "").partition(_NAMES[0])
    between, found, _ = behind.partition(_NAMES[1])
    following = between.rpartition(written.each.behind_value)[2] if found else None
    closing = written.tail.rstrip("\n")
    return CallFormat(opening.split()[0], opening, written.head, following, closing, each=written.each)


def _to_end(text: str, tokenizer: Tokenizer) -> str:
    """Up to the end of the turn."""
    return text[: min((at for end in _ends(tokenizer) if (at := text.find(end)) >= 0), default=len(text))]


def _following(two: str | None) -> str | None:
    if two is None or two.rfind(_NAMES[1]) < 0:
        return None
    second = two.rindex(_NAMES[1])
    first = list(re.finditer(_arguments_pattern(), two[:second]))
    return _without_ids(two[first[-1].end() : second]) if first else None


def _behind_reasoning(opening: str) -> str:
    for _, closing in TAGS:
        opening = opening.rpartition(closing)[2]
    return opening.lstrip()


def _tool(name: str) -> Turn:
    parameters = {"type": "object", "properties": {"probe_key": {"type": "string"}}, "required": ["probe_key"]}
    return {"type": "function", "function": {"name": name, "description": "probe", "parameters": parameters}}


def _ends(tokenizer: Tokenizer) -> list[str]:
    return [text for i, text in tokenizer.hidden_tokens.items() if i in tokenizer.eos_token_ids]


def _arguments_pattern() -> str:
    return r"\{\s*\"probe_key\"\s*:\s*\"probe_value\"\s*\}"


def _without_ids(text: str) -> str:
    """Calls that are drawn have no ids yet."""
    return re.sub(rf',\s*"id"\s*:\s*"({"|".join(_IDS)})"', "", text)


@dataclass(frozen=True)
class WrittenArguments:
    """A call's text behind its function's name: `head`, arguments if any, `tail`."""

    head: str
    each: ParameterFormat
    tail: str


def read_arguments(none: str, two: str, probes: Sequence[str]) -> WrittenArguments | None:
    """Take a call's text behind its name apart.

    Args:
        none: of a call without arguments.
        two: of one with two arguments.
        probes: name and value of the first argument, then of the second.

    Returns:
        None: it is written in another way.
    """
    pieces = _between(two, probes)
    if pieces is None:
        return None
    first, before_value, following, again, rest = pieces
    # A tag's first character is no part of what both have in front of it.
    head = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(none, first, strict=False)))
    head = head.rstrip("<[")
    before_name, tail = first[len(head) :], none[len(head) :]
    behind_value = following.removesuffix(before_name)
    parts = (before_name.strip(), before_value.strip(), behind_value.strip(), tail.strip())
    whole = following == behind_value + before_name and rest == behind_value + tail and before_value == again
    if not whole or not all(parts):
        return None
    return WrittenArguments(head, ParameterFormat(before_name, before_value, behind_value), tail)


def _between(text: str, probes: Sequence[str]) -> list[str] | None:
    """What stands before, between and behind texts that come in this order."""
    pieces = []
    for probe in probes:
        before, found, text = text.partition(probe)
        if not found:
            return None
        pieces.append(before)
    return [*pieces, text]


def named_roles(tokenizer: Tokenizer) -> frozenset[str]:
    """Roles in whose turns a name is part of the prompt."""
    return frozenset(role for role in _ROLES if any(_writes_name(tokenizer, turns) for turns in _named_turns(role)))


def _named_turns(role: str) -> Sequence[Sequence[Turn]]:
    named = {"role": role, "content": "paceline_probe_text", "name": _USER_NAME}
    if role == "system":
        return ([named, _USER],)
    if role != "tool":
        return ([_USER, named][role == "user" :],)
    as_object: dict[str, str] = {}
    return [_named_result(named, arguments) for arguments in (as_object, "{}")]


def _named_result(named: Turn, arguments: Any) -> Sequence[Turn]:
    """A call and what it came to; templates want arguments as an object, or as text."""
    function = {"name": "paceline_probe_function", "arguments": arguments}
    call = {"id": _IDS[0], "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [_USER, answer, {**named, "tool_call_id": _IDS[0]}]


def _writes_name(tokenizer: Tokenizer, turns: Sequence[Turn]) -> bool:
    try:
        return _USER_NAME in tokenizer.template_text(turns)
    except (InvalidInput, Unsupported):
        return False
