"""How a model's template writes what isn't plain text: calls of functions, and reasoning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import Unsupported

PYTHON_TAG = "<|python_tag|>"
ARGUMENT_KEYS = ("arguments", "parameters")
"""Of a call that is a JSON object; the other key is `name`."""
OPENING_OBJECT = re.compile(r'(?P<list>\[)?\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"$')
_TAIL_TOKENS = 24
"""Enough for the longest opening of the known ones, letter by letter, and white space behind it."""


@dataclass(frozen=True)
class ParameterFormat:
    """The text around one argument: `name_prefix` NAME `value_prefix` VALUE `value_suffix`, white space kept."""

    name_prefix: str
    value_prefix: str
    value_suffix: str


@dataclass(frozen=True)
class CallFormat:
    """The text around names and arguments of calls.

    Attributes:
        marker: what a reply's first call begins with; empty: nothing but the call's own JSON.
        opening: from the marker to the name, white space at both ends kept.
        name_suffix: from a name to its arguments.
        separator: from the arguments of one call to the name of the next; None: one call a turn.
        closing: from the last call's arguments to the end of the turn.
        as_text: whether the template wants arguments as JSON text instead of an object.
        parameter: the text around each argument; None: the arguments are one JSON object.
    """

    marker: str
    opening: str
    name_suffix: str
    separator: str | None
    closing: str
    as_text: bool = False
    parameter: ParameterFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """What a call in free text begins with.

        Llama's templates write bare JSON, and its models put a tag in front.
        """
        return (self.marker or PYTHON_TAG,)

    @property
    def is_json(self) -> bool:
        """Whether the name is part of a JSON object, or of a list of them."""
        return OPENING_OBJECT.search(self.opening) is not None

    @property
    def is_list(self) -> bool:
        """Whether calls are the items of one list."""
        match = OPENING_OBJECT.search(self.opening)
        return match is not None and match["list"] is not None


@dataclass(frozen=True)
class ReasoningTags:
    """What a span of reasoning begins and ends with."""

    opening: str
    closing: str


@dataclass(frozen=True)
class ReplyFormat:
    """What a reply of this model may consist of.

    Attributes:
        calls: None: the template has no functions, or writes them in an unknown way.
        no_calls_reason: why there are none.
        reasoning: None: the template has no reasoning.
        tokens: texts that are one token wherever they stand, and their ids.
        marker_tokens: special tokens that the format is made of, which a coordinator's text leaves out, by id.
    """

    calls: CallFormat | None = None
    no_calls_reason: str = ""
    reasoning: ReasoningTags | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    marker_tokens: Mapping[int, str] = field(default_factory=dict)

    def markers(self, *, calls: bool) -> Mapping[int, str]:
        """Return the marker tokens of reasoning, and those of calls where any may come."""
        tags = f"{self.reasoning.opening} {self.reasoning.closing}" if self.reasoning else ""
        return {i: text for i, text in self.marker_tokens.items() if calls or text in tags}

    def require_calls(self) -> CallFormat:
        """Return the format of calls.

        Raises:
            Unsupported: there is none.
        """
        if self.calls is None:
            raise Unsupported.of("tools", self.no_calls_reason)
        return self.calls


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[int], tags: ReasoningTags | None) -> bool:
    """Whether a rendered chat ends inside a span of reasoning that the template opened itself."""
    if tags is None:
        return False
    marker_tokens = tokenizer.hidden_tokens
    tail = prompt[-_TAIL_TOKENS:]
    text = "".join(marker_tokens.get(i) or tokenizer.decode((i,)) for i in tail)
    return text.rstrip().endswith(tags.opening)
