"""A stream of OpenAI's chat chunks, read as the parts that other dialects' streams have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True)
class ReplyPart:
    """A piece of a part: text, reasoning, or a call's arguments; `begins` on the part's first one."""

    kind: Kind
    text: str
    begins: bool
    id: str = ""
    name: str = ""


def only_ours(body: Mapping[str, Any]) -> dict[str, Any]:
    """What no other API has of a chunk or a whole completion: our own object, where it says something."""
    return {"paceline": body["paceline"]} if body.get("paceline") else {}


def cached_tokens(usage: Mapping[str, Any]) -> int:
    """Tokens of the prompt that were read from a cache; 0 where that isn't said."""
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


class ChatParts:
    """Keeps what the chunks say at the end of a stream of one choice: its reason, usage, and the last chunk."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.usage: Mapping[str, Any] | None = None
        self.last: Mapping[str, Any] = {}
        self._at: tuple[Kind, int] | None = None

    def of(self, chunk: Mapping[str, Any]) -> Iterator[ReplyPart]:
        """Parts of one chunk, in order."""
        self.last = chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_reason = choice.get("stop_reason") or self.stop_reason
            yield from self._of_delta(choice["delta"])

    def _of_delta(self, delta: Mapping[str, Any]) -> Iterator[ReplyPart]:
        if delta.get("reasoning_content"):
            yield ReplyPart("reasoning", delta["reasoning_content"], self._begins("reasoning", 0))
        if delta.get("content"):
            yield ReplyPart("text", delta["content"], self._begins("text", 0))
        for call in delta.get("tool_calls") or ():
            function, begins = call.get("function") or {}, self._begins("call", call["index"])
            yield ReplyPart(
                "call", function.get("arguments") or "", begins, call.get("id") or "", function.get("name") or ""
            )

    def _begins(self, kind: Kind, index: int) -> bool:
        before, self._at = self._at, (kind, index)
        return before != self._at
