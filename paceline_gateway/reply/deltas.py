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
    """Takes a reply's text in pieces of any size; the cut decides how deltas are cut, never what they join to."""

    def feed(self, text: str) -> list[ReplyDelta]:
        """Return the deltas that this piece makes certain."""

    def finish(self, *, is_cut: bool = False) -> list[ReplyDelta]:
        """End the reply and return what was held back as the possible start of a marker.

        Args:
            is_cut: whether a limit or a stop string ended it. The certain start of a call is no content then.
        """

    @property
    def has_partial_call(self) -> bool:
        """Whether the reply was cut before its last call was complete."""


def join_deltas(deltas: Iterable[ReplyDelta]) -> list[ReplyDelta]:
    """Join neighbours of one kind, a call's pieces too."""
    runs: list[ReplyDelta] = []
    for delta in deltas:
        last = runs[-1] if runs else ReplyDelta()
        pair = _join(last, delta)
        if pair is None:
            runs.append(delta)
        else:
            runs[-1:] = [pair]
    return runs


def _join(first: ReplyDelta, second: ReplyDelta) -> ReplyDelta | None:
    """Join two deltas of one kind; None: they are of different kinds."""
    if first.content and second.content:
        return ReplyDelta(content=first.content + second.content)
    if first.reasoning and second.reasoning:
        return ReplyDelta(reasoning=first.reasoning + second.reasoning)
    one, other = first.tool_call, second.tool_call
    if one is None or other is None or one.index != other.index:
        return None
    return ReplyDelta(tool_call=ToolCallDelta(one.index, one.id, one.name, one.arguments + other.arguments))
