"""What a chat's text says: content, reasoning, calls of tools. Text of a model without any of these is content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call: id and name with its first, then pieces of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class ReplyDelta:
    """What some text adds to a reply."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


class ReplyParser(Protocol):
    """Reads one reply piece by piece."""

    def feed(self, text: str) -> list[ReplyDelta]:
        """What has become certain with more text."""

    def finish(self) -> list[ReplyDelta]:
        """What was held back until the end."""


class PlainReply:
    """All text is content."""

    def feed(self, text: str) -> list[ReplyDelta]:  # noqa: D102
        return [ReplyDelta(content=text)] if text else []

    def finish(self) -> list[ReplyDelta]:  # noqa: D102
        return []


def reply_parser() -> ReplyParser:
    """The parser of one choice."""
    return PlainReply()
