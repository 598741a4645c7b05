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
class MessageWithPaths:
    """A message of the chat, and the request's own paths of its parts; "" is the path of the whole message."""

    message: dict[str, Any]
    paths: dict[str, str]

    def add_call(self, call: Mapping[str, Any], paths: Mapping[str, str]) -> None:
        """Append a call, with the paths of its parts."""
        calls = self.message.setdefault("tool_calls", [])
        self.paths |= {f"tool_calls.{len(calls)}.{part}": path for part, path in paths.items()}
        calls.append(dict(call))


@dataclass(frozen=True)
class ChatTranslation:
    """A request, translated to one of OpenAI's chat.

    Attributes:
        chat: the chat request, in OpenAI's shape.
        names: the request's own names of the chat's fields.
        ignored_fields: the request's fields that change nothing, without its hints.
    """

    chat: Mapping[str, Any]
    names: Names
    ignored_fields: frozenset[str] = field(default_factory=frozenset)


def assemble_chat(
    fields: Mapping[str, Any], messages: Iterable[MessageWithPaths], names: Names, ignored_fields: Iterable[str] = ()
) -> ChatTranslation:
    """Put a chat together, and name its messages by their places."""
    own_names, plain_messages = dict(names), []
    for place, message in enumerate(messages):
        plain_messages.append(message.message)
        for part, path in message.paths.items():
            own_names[f"messages.{place}.{part}" if part else f"messages.{place}"] = path
    return ChatTranslation({**fields, "messages": plain_messages}, own_names, frozenset(ignored_fields))


@dataclass(frozen=True)
class ReplyPart:
    """A piece of a part: text, reasoning, or a call's arguments; `is_first`: it begins the part."""

    kind: Kind
    text: str
    is_first: bool
    id: str = ""
    name: str = ""


def paceline_field(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return our own object of a chunk or a whole completion, if it says something; no other API has it."""
    return {"paceline": body["paceline"]} if body.get("paceline") else {}


def cached_tokens(usage: Mapping[str, Any]) -> int:
    """Return how many tokens of the prompt came from a cache; 0 if the chat doesn't say."""
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


class ChatParts:
    """Splits the chunks of one choice into parts; keeps what the last chunks say: finish reason, usage, the chunk."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.usage: Mapping[str, Any] | None = None
        self.last_chunk: Mapping[str, Any] = {}
        self._part_key: tuple[Kind, int] | None = None

    def parts_of(self, chunk: Mapping[str, Any]) -> Iterator[ReplyPart]:
        """Yield the parts of one chunk, in order."""
        self.last_chunk = chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_reason = choice.get("stop_reason") or self.stop_reason
            yield from self._delta_parts(choice["delta"])

    def _delta_parts(self, delta: Mapping[str, Any]) -> Iterator[ReplyPart]:
        if delta.get("reasoning_content"):
            yield ReplyPart("reasoning", delta["reasoning_content"], self._begins("reasoning", 0))
        if delta.get("content"):
            yield ReplyPart("text", delta["content"], self._begins("text", 0))
        for call in delta.get("tool_calls") or ():
            function, is_first = call.get("function") or {}, self._begins("call", call["index"])
            text, name = function.get("arguments") or "", function.get("name") or ""
            yield ReplyPart("call", text, is_first, call.get("id") or "", name)

    def _begins(self, kind: Kind, index: int) -> bool:
        previous_key, self._part_key = self._part_key, (kind, index)
        return previous_key != self._part_key
