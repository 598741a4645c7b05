"""How a model's template writes what isn't plain text: calls of functions, and reasoning.

A call with names that are known beforehand is rendered by the template itself; what stands around them is
the format. So no list of models is needed, and a grammar can be written in the template's own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.models.reasoning import TAGS, template_tags
from paceline.models.tokenizer import Tokenizer
from paceline.models.turns import Turn
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline_gateway.parameter_format import ParameterFormat, read_arguments
from paceline_gateway.unsupported import unsupported

_NAMES = ("paceline_probe_one", "paceline_probe_two")
_ARGUMENTS = {"probe_key": "probe_value"}
_FURTHER = {"probe_other": "probe_third"}
_IDS = ("prbAAAAA1", "prbAAAAA2")
"""Nine letters and digits: Mistral's templates take no others."""
PYTHON_TAG = "<|python_tag|>"
_USER: Turn = {"role": "user", "content": "paceline_probe_question"}
_SAID = "paceline_probe_answer"
_OBJECT = re.compile(r'(?P<list>\[)?\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"$')


@dataclass(frozen=True)
class CallFormat:
    """The text around names and arguments of calls.

    Attributes:
        marker: what a reply's first call begins with; empty: nothing but the call's own JSON.
        opening: from the marker to the name, white space at both ends kept.
        between: from a name to its arguments.
        following: from the arguments of one call to the name of the next; None: one call a turn.
        closing: from the last call's arguments to the end of the turn.
        as_text: whether the template wants arguments as JSON text instead of an object.
        each: how arguments are written one by one; None: they are one JSON object.
    """

    marker: str
    opening: str
    between: str
    following: str | None
    closing: str
    as_text: bool = False
    each: ParameterFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """What a call in free text begins with. Llama's templates write bare JSON; its models put a tag in front."""
        return (self.marker or PYTHON_TAG,)

    @property
    def is_json(self) -> bool:
        """Whether the name is part of a JSON object, or of a list of them."""
        return _OBJECT.search(self.opening) is not None

    @property
    def is_list(self) -> bool:
        """Whether calls are the items of one list."""
        found = _OBJECT.search(self.opening)
        return found is not None and found["list"] is not None


@dataclass(frozen=True)
class ReasoningTags:
    """What a span of reasoning begins and ends with."""

    opening: str
    closing: str


@dataclass(frozen=True)
class ReplyFormat:
    """What a reply of this model may consist of.

    Attributes:
        calls: None: the template has no functions, or writes them in a way that isn't known (`no_calls` says why).
        reasoning: None: the template knows of none.
        tokens: texts that are one token wherever they stand, by their ids.
        hidden: special tokens that the format is made of, which a coordinator's text leaves out.
    """

    calls: CallFormat | None = None
    no_calls: str = ""
    reasoning: ReasoningTags | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    hidden: Mapping[int, str] = field(default_factory=dict)

    def hidden_tokens(self, *, calls: bool) -> Mapping[int, str]:
        """Those of reasoning, and of calls where any may come."""
        tags = f"{self.reasoning.opening} {self.reasoning.closing}" if self.reasoning else ""
        return {i: text for i, text in self.hidden.items() if calls or text in tags}

    def require_calls(self) -> CallFormat:
        """The format of calls.

        Raises:
            Unsupported: there is none.
        """
        if self.calls is None:
            raise unsupported("tools", self.no_calls)
        return self.calls


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


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[int], tags: ReasoningTags | None) -> bool:
    """Whether a rendered chat ends inside a span of reasoning that the template opened itself."""
    if tags is None:
        return False
    hidden = tokenizer.hidden_tokens
    tail = prompt[-_TAIL_TOKENS:]
    text = "".join(hidden.get(i) or tokenizer.decode((i,)) for i in tail)
    return text.rstrip().endswith(tags.opening)


_TAIL_TOKENS = 24
"""Enough for the longest opening of the known ones, letter by letter, and white space behind it."""


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
    shape = _OBJECT.search(opening)
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
