"""What the dialects' translations have in common.

A request becomes one of OpenAI's chat, and each part of it keeps the path that it came from. A stream of chat chunks
is read as the parts that other dialects' streams have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline_gateway.openai.field_names import Names

Kind = Literal["reasoning", "text", "call"]


@dataclass
class PlacedMessage:
    """A message of the chat, and the request's own paths of its parts; "" is the whole message's."""

    message: dict[str, Any]
    paths: dict[str, str]

    def add_call(self, call: Mapping[str, Any], paths: Mapping[str, str]) -> None:
        """A call behind the message's others, with the paths of its parts."""
        calls = self.message.setdefault("tool_calls", [])
        self.paths |= {f"tool_calls.{len(calls)}.{part}": own for part, own in paths.items()}
        calls.append(dict(call))


@dataclass(frozen=True)
class Translated:
    """The chat request that asks for the same.

    Attributes:
        chat: in OpenAI's shape.
        names: what the request calls the chat's fields.
        ignored: the request's fields that change nothing, beside its hints.
    """

    chat: Mapping[str, Any]
    names: Names
    ignored: frozenset[str] = field(default_factory=frozenset)


def translated(
    fields: Mapping[str, Any], messages: Iterable[PlacedMessage], names: Names, ignored: Iterable[str] = ()
) -> Translated:
    """Put together a chat, its messages named by their places."""
    placed = dict(names)
    listed = list(messages)
    for place, each in enumerate(listed):
        for part, own in each.paths.items():
            placed[f"messages.{place}.{part}" if part else f"messages.{place}"] = own
    return Translated({**fields, "messages": [each.message for each in listed]}, placed, frozenset(ignored))


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
