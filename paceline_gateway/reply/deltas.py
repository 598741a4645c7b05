"""What a reply's text consists of, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call: id and name come with its first one, then pieces of the arguments' JSON."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class ReplyDelta:
    """A piece of a reply; one of the three is set."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


class ReplyParser(Protocol):
    """Takes a reply's text in pieces of any size: the cut decides how deltas are cut, never what they join to."""

    def feed(self, text: str) -> list[ReplyDelta]:
        """What has become certain with this piece."""

    def finish(self, *, cut: bool = False) -> list[ReplyDelta]:
        """What was held back as the possible start of a marker; the reply has ended.

        Args:
            cut: by a limit or a stop string. What certainly began a call is no content then.
        """

    @property
    def cut_in_call(self) -> bool:
        """Whether the reply was cut before its last call was whole."""


def joined(deltas: Iterable[ReplyDelta]) -> list[ReplyDelta]:
    """The same with neighbours of one kind as one; a call's pieces too."""
    merged: list[ReplyDelta] = []
    for delta in deltas:
        last = merged[-1] if merged else ReplyDelta()
        both = _one(last, delta)
        if both is None:
            merged.append(delta)
        else:
            merged[-1:] = [both]
    return merged


def _one(first: ReplyDelta, second: ReplyDelta) -> ReplyDelta | None:
    """Both in one, if they are neighbours of one kind."""
    if first.content and second.content:
        return ReplyDelta(content=first.content + second.content)
    if first.reasoning and second.reasoning:
        return ReplyDelta(reasoning=first.reasoning + second.reasoning)
    one, other = first.tool_call, second.tool_call
    if one is None or other is None or one.index != other.index:
        return None
    return ReplyDelta(tool_call=ToolCallDelta(one.index, one.id, one.name, one.arguments + other.arguments))
