"""What a model's chat template writes, found by rendering probes: turns with names and values of ours.

The text around them is the format. So no list of models is needed, and a grammar can be written in the template's own
words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from paceline.models.reasoning import TAGS, template_tags
from paceline.models.rendering import Turn
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline_gateway.reply.format import OPENING_OBJECT, CallFormat, ParameterFormat, ReasoningTags, ReplyFormat

_NAMES = ("paceline_probe_one", "paceline_probe_two")
_ARGUMENT = {"probe_key": "probe_value"}
_SECOND_ARGUMENT = {"probe_other": "probe_third"}
_IDS = ("prbAAAAA1", "prbAAAAA2")
"""Nine letters and digits: Mistral's templates take no others."""
_USER: Turn = {"role": "user", "content": "paceline_probe_question"}
_ANSWER = "paceline_probe_answer"
_SENDER = "paceline_probe_name"
_ROLES = ("system", "user", "assistant", "tool")


def read_reply_format(tokenizer: Tokenizer) -> ReplyFormat:
    """Have the template render calls and an answer's start, and read the format off them.

    It takes some milliseconds, once a model.
    """
    try:
        calls, no_calls_reason = _read_calls(tokenizer), ""
    except Unsupported as error:
        calls, no_calls_reason = None, error.message
    tags = template_tags(tokenizer)
    reasoning = ReasoningTags(*tags) if tags else None
    texts = _format_texts(calls, reasoning)
    ends = _turn_ends(tokenizer)
    marker_tokens = {
        token_id: token
        for token_id, token in tokenizer.hidden_tokens.items()
        if token not in ends and any(token in text for text in texts)
    }
    return ReplyFormat(calls, no_calls_reason, reasoning, dict(tokenizer.added_tokens), marker_tokens)


def _format_texts(calls: CallFormat | None, reasoning: ReasoningTags | None) -> list[str]:
    """Return all texts that a format is made of."""
    texts = [reasoning.opening, reasoning.closing] if reasoning else []
    if calls is not None:
        texts += [*calls.markers, calls.opening, calls.name_suffix, calls.separator or "", calls.closing]
        if (parameter := calls.parameter) is not None:
            texts += [parameter.name_prefix, parameter.value_prefix, parameter.value_suffix]
    return texts


def _read_calls(tokenizer: Tokenizer) -> CallFormat:
    tools = [_tool(name) for name in _NAMES]
    try:
        with_tools = tokenizer.template_text([_USER], tools)
    except InvalidInput as error:
        raise Unsupported(f"the model's chat template refuses them ({error.message})") from error
    if _NAMES[0] not in with_tools:
        raise Unsupported("the model's chat template has none")
    for as_text in (False, True):
        one_call = _call_text(tokenizer, tools, 1, as_text=as_text)
        if one_call is not None and _NAMES[0] in one_call:
            two_calls = _call_text(tokenizer, tools, 2, as_text=as_text)
            by_parameter = None if as_text else _format_by_parameter(tokenizer, tools, two_calls)
            return by_parameter or _call_format(one_call, two_calls, tokenizer, as_text=as_text)
    raise Unsupported("the model's chat template can't write a call")


def _call_text(
    tokenizer: Tokenizer,
    tools: Sequence[Turn],
    count: int,
    arguments: Mapping[str, str] = _ARGUMENT,
    *,
    as_text: bool = False,
) -> str | None:
    """Return what the template writes for an answer of `count` calls.

    None: the template refuses them, or the answer can't be found in its text.
    """
    call_arguments: Any = json.dumps(arguments) if as_text else arguments
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": call_arguments}}
        for call_id, name in zip(_IDS[:count], _NAMES, strict=False)
    ]
    try:
        text_answer, call_answer = (
            tokenizer.template_text([_USER, {"role": "assistant", **answer}], tools, answer_follows=False)
            for answer in ({"content": _ANSWER}, {"content": "", "tool_calls": calls})
        )
    except InvalidInput:
        return None
    header = _without_last_reasoning(text_answer.partition(_ANSWER)[0])
    return call_answer[len(header) :] if call_answer.startswith(header) else None


def _without_last_reasoning(header: str) -> str:
    """Cut off the empty span of reasoning that templates write at the end of the last answer's header."""
    question_at = max(0, header.rfind(_USER["content"]))
    starts = (header.find(opening, question_at) for opening, _ in TAGS)
    return header[: min((position for position in starts if position >= 0), default=len(header))].rstrip()


def _call_format(one_call: str, two_calls: str | None, tokenizer: Tokenizer, *, as_text: bool) -> CallFormat:
    pieces = re.split(f"{_NAMES[0]}|{_arguments_pattern()}", one_call)
    if len(pieces) != 3:
        raise Unsupported("the model's chat template writes calls in a format that isn't known")
    opening, gap, rest = (_without_ids(piece) for piece in pieces)
    opening = _without_first_reasoning(opening)
    closing = _cut_at_turn_end(rest, tokenizer)
    shape = OPENING_OBJECT.search(opening)
    marker = (opening[: shape.start()] if shape else opening).strip()
    if not shape and not marker:
        raise Unsupported("the model's chat template writes calls in a format that isn't known")
    return CallFormat(marker, opening, gap, _call_separator(two_calls), closing.rstrip("\n"), as_text)


def _format_by_parameter(tokenizer: Tokenizer, tools: Sequence[Turn], two_calls: str | None) -> CallFormat | None:
    """Return the format if the template writes arguments one by one; None: it does not."""
    two_arguments = _ARGUMENT | _SECOND_ARGUMENT
    no_arguments_call = _call_text(tokenizer, tools, 1, {})
    two_arguments_call = _call_text(tokenizer, tools, 1, two_arguments)
    if no_arguments_call is None or two_arguments_call is None:
        return None
    opening, _, no_arguments_rest = no_arguments_call.partition(_NAMES[0])
    layout = read_arguments(
        _cut_at_turn_end(no_arguments_rest, tokenizer),
        _cut_at_turn_end(two_arguments_call.partition(_NAMES[0])[2], tokenizer),
        probes=[text for pair in two_arguments.items() for text in pair],
    )
    opening = _without_first_reasoning(opening)
    if layout is None or not opening.strip():
        return None
    _, _, rest = (two_calls or "").partition(_NAMES[0])
    gap, has_second, _ = rest.partition(_NAMES[1])
    separator = gap.rpartition(layout.parameter.value_suffix)[2] if has_second else None
    closing = layout.tail.rstrip("\n")
    return CallFormat(opening.split()[0], opening, layout.head, separator, closing, parameter=layout.parameter)


def _cut_at_turn_end(text: str, tokenizer: Tokenizer) -> str:
    """Return the text up to the end of the turn."""
    positions = [text.find(end) for end in _turn_ends(tokenizer)]
    return text[: min((position for position in positions if position >= 0), default=len(text))]


def _call_separator(two_calls: str | None) -> str | None:
    if two_calls is None or two_calls.rfind(_NAMES[1]) < 0:
        return None
    second_name_at = two_calls.rindex(_NAMES[1])
    matches = list(re.finditer(_arguments_pattern(), two_calls[:second_name_at]))
    return _without_ids(two_calls[matches[-1].end() : second_name_at]) if matches else None


def _without_first_reasoning(opening: str) -> str:
    for _, closing in TAGS:
        opening = opening.rpartition(closing)[2]
    return opening.lstrip()


def _tool(name: str) -> Turn:
    parameters = {"type": "object", "properties": {"probe_key": {"type": "string"}}, "required": ["probe_key"]}
    return {"type": "function", "function": {"name": name, "description": "probe", "parameters": parameters}}


def _turn_ends(tokenizer: Tokenizer) -> list[str]:
    return [text for i, text in tokenizer.hidden_tokens.items() if i in tokenizer.eos_token_ids]


def _arguments_pattern() -> str:
    return r"\{\s*\"probe_key\"\s*:\s*\"probe_value\"\s*\}"


def _without_ids(text: str) -> str:
    """Cut out ids: a model's own calls have none yet."""
    return re.sub(rf',\s*"id"\s*:\s*"({"|".join(_IDS)})"', "", text)


@dataclass(frozen=True)
class ArgumentLayout:
    """The text of a call behind its function's name: `head`, arguments if any, `tail`."""

    head: str
    parameter: ParameterFormat
    tail: str


def read_arguments(no_arguments: str, two_arguments: str, probes: Sequence[str]) -> ArgumentLayout | None:
    """Find the text around arguments that are written one by one.

    Args:
        no_arguments: what stands behind the name in a call without arguments.
        two_arguments: the same in a call with two arguments.
        probes: name and value of the first argument, then of the second.

    Returns:
        None: the template writes arguments in another way.
    """
    pieces = _split_at(two_arguments, probes)
    if pieces is None:
        return None
    first, value_prefix, middle, second_prefix, rest = pieces
    # A tag's first character is no part of what both have in front of it.
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(no_arguments, first, strict=False))
    head = "".join(character for character, _ in pairs).rstrip("<[")
    name_prefix, tail = first[len(head) :], no_arguments[len(head) :]
    value_suffix = middle.removesuffix(name_prefix)
    parts = (name_prefix.strip(), value_prefix.strip(), value_suffix.strip(), tail.strip())
    is_consistent = (middle, rest, second_prefix) == (value_suffix + name_prefix, value_suffix + tail, value_prefix)
    if not is_consistent or not all(parts):
        return None
    return ArgumentLayout(head, ParameterFormat(name_prefix, value_prefix, value_suffix), tail)


def _split_at(text: str, probes: Sequence[str]) -> list[str] | None:
    """Split a text at probes that come in this order; None: one of them is missing."""
    pieces = []
    for probe in probes:
        piece, match, text = text.partition(probe)
        if not match:
            return None
        pieces.append(piece)
    return [*pieces, text]


def named_roles(tokenizer: Tokenizer) -> frozenset[str]:
    """Return the roles whose `name` the template writes into the prompt."""
    return frozenset(role for role in _ROLES if any(_writes_name(tokenizer, turns) for turns in _named_turns(role)))


def _named_turns(role: str) -> Sequence[Sequence[Turn]]:
    turn = {"role": role, "content": "paceline_probe_text", "name": _SENDER}
    if role == "system":
        return ([turn, _USER],)
    if role != "tool":
        return ([_USER, turn][role == "user" :],)
    object_arguments: dict[str, str] = {}
    return [_named_result(turn, arguments) for arguments in (object_arguments, "{}")]


def _named_result(turn: Turn, arguments: Any) -> Sequence[Turn]:
    """Return turns with a call and its output; templates want arguments as an object, or as text."""
    function = {"name": "paceline_probe_function", "arguments": arguments}
    call = {"id": _IDS[0], "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [_USER, answer, {**turn, "tool_call_id": _IDS[0]}]


def _writes_name(tokenizer: Tokenizer, turns: Sequence[Turn]) -> bool:
    try:
        return _SENDER in tokenizer.template_text(turns)
    except (InvalidInput, Unsupported):
        return False
