"""A request of another API as one of OpenAI's chat, and where each part of it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_gateway.field_names import Names


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
