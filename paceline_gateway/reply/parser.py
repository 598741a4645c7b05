"""A reply's text, as it streams, in its parts: content, reasoning, and calls of functions.

Nothing is held back but a possible start of a marker, with the white space in front of it. A call that turns
out to be none (broken JSON, a name that nobody offered where nothing else marks a call) is content, whole.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection

from paceline_gateway.reply.call_reader import CallReader
from paceline_gateway.reply.deltas import ReplyDelta, ReplyParser, joined
from paceline_gateway.reply.format import CallFormat, ReasoningTags, ReplyFormat
from paceline_gateway.reply.json_calls import JsonCalls, NamedCalls
from paceline_gateway.reply.parameter_calls import ParameterCalls

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""What Mistral's templates demand of an id; 10^16 of them."""
MAX_HELD_SPACE = 256
"""White space that may belong to a marker behind it; more is content."""


def reply_parser(
    form: ReplyFormat,
    functions: Collection[str] = (),
    *,
    in_reasoning: bool = False,
    must_call: bool = False,
    calls_first: bool = False,
    new_id: Callable[[], str] | None = None,
) -> ReplyParser:
    """What takes one reply apart.

    Args:
        form: the model's format.
        functions: names that may be called; none: the text of a call is content.
        in_reasoning: whether the template opened a span of reasoning (`opens_reasoning`).
        must_call: whether the reply is held to calls: behind its reasoning it is nothing else.
        calls_first: whether content has no calls behind it: what looks like one there is part of it.
        new_id: ids of calls.
    """
    calls = form.calls if functions else None
    if calls is None and form.reasoning is None:
        return PlainReply()
    reader = call_reader(calls, functions, new_id or _new_id) if calls else None
    return MarkedReply(
        reader, form.reasoning, in_reasoning=in_reasoning, must_call=must_call, calls_first=calls_first
    )


def call_reader(form: CallFormat, functions: Collection[str], new_id: Callable[[], str]) -> CallReader:
    """What reads calls of this format; with their schemas by name, functions' arguments have the right types."""
    if form.each is not None:
        return ParameterCalls(form, functions, new_id)
    return (JsonCalls if form.is_json else NamedCalls)(form, functions, new_id)


class PlainReply:
    """Of a model that writes nothing but content."""

    cut_in_call = False

    def feed(self, text: str) -> list[ReplyDelta]:
        """As it comes."""
        return [ReplyDelta(content=text)] if text else []

    def finish(self, *, cut: bool = False) -> list[ReplyDelta]:
        """Nothing was held back."""
        return []


class MarkedReply:
    """Goes from character to character, so that the cut into pieces can't matter.

    The current state is what takes the next character: `_content`, `_reasoning`, or a call's reader.
    """

    def __init__(
        self,
        calls: CallReader | None,
        tags: ReasoningTags | None,
        *,
        in_reasoning: bool,
        must_call: bool,
        calls_first: bool,
    ) -> None:
        self.cut_in_call = False
        self._calls = calls
        self._tags = tags
        self._must_call, self._calls_first = must_call, calls_first
        self._spoke = False
        """Whether content has come."""
        self._deltas: list[ReplyDelta] = []
        self._held = ""
        self._plain = re.compile(rf"[^\s{re.escape(''.join(self._beginnings()))}]+")
        self._said = False
        self._trim = in_reasoning
        self._state = self._reasoning if in_reasoning else self._content

    def feed(self, text: str) -> list[ReplyDelta]:
        """What has become certain with this piece."""
        at = 0
        while at < len(text):
            at = self._run(text, at)
            if at < len(text):
                self._state(text[at])
                at += 1
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[ReplyDelta]:
        """What was held back; the reply has ended."""
        begun = cut and self._must_call and self._state == self._content
        if self._calls is not None and self._state == self._call:
            self.cut_in_call = cut and not self._calls.is_whole
            self._deltas += self._calls.finish(is_call=cut and (self._must_call or self._calls.is_marked))
        elif not begun and (not self._trim or self._held.strip()):
            self._say(self._held, reasoning=self._state == self._reasoning)
        self._held = ""
        return self._taken()

    def _run(self, text: str, at: int) -> int:
        """Take characters that need no look each: no marker begins with them, or they are arguments."""
        if self._calls is not None and self._state == self._call:
            end, deltas = self._calls.run(text, at)
            self._deltas += deltas
            return end
        found = None if self._held or self._trim else self._plain.match(text, at)
        if found is None:
            return at
        self._say(found[0], reasoning=self._state == self._reasoning)
        return found.end()

    def _taken(self) -> list[ReplyDelta]:
        taken, self._deltas = joined(self._deltas), []
        return taken

    def _content(self, character: str) -> None:
        marker = self._marker(character, self._content_markers(), reasoning=False)
        if marker is None:
            return
        held, self._held = self._held, ""
        if self._tags is not None and marker == self._tags.opening:
            self._state, self._trim = self._reasoning, True
        elif self._calls is not None:
            self._calls.begin(held, marker)
            self._state = self._call

    def _reasoning(self, character: str) -> None:
        assert self._tags is not None, "only a model with tags reasons"
        if self._marker(character, (self._tags.closing,), reasoning=True) is not None:
            self._held = ""
            self._state, self._trim, self._said = self._content, True, True

    def _call(self, character: str) -> None:
        assert self._calls is not None, "only a model with calls gets here"
        deltas = self._calls.push(character)
        self._deltas += deltas
        self._spoke = self._spoke or any(delta.content for delta in deltas)
        if self._calls.done:
            self._said, self._trim = True, False
            self._state = self._content
            for again in self._calls.again:
                self._state(again)

    def _beginnings(self) -> set[str]:
        """Characters that any marker begins with."""
        calls = self._calls.markers(first=True) if self._calls else ()
        tags = (self._tags.opening, self._tags.closing) if self._tags else ()
        return {marker[0] for marker in (*calls, *tags)}

    def _content_markers(self) -> tuple[str, ...]:
        """Reasoning comes first in a reply, and so does a call that nothing but its JSON marks."""
        reasoning = (self._tags.opening,) if self._tags and not self._said else ()
        reader = None if self._calls_first and self._spoke else self._calls
        calls = reader.markers(first=not self._said or self._trim) if reader else ()
        return reasoning + calls

    def _marker(self, character: str, markers: Collection[str], *, reasoning: bool) -> str | None:
        """Hold what may become a marker and release what can't; the marker that has become whole."""
        self._held += character
        while self._held:
            start = self._held.lstrip()
            if start in markers:
                return start
            if any(marker.startswith(start) for marker in markers) and len(self._held) < MAX_HELD_SPACE:
                return None
            self._say(self._held[0], reasoning=reasoning)
            self._held = self._held[1:]
        return None

    def _say(self, text: str, *, reasoning: bool) -> None:
        if self._trim:
            text = text.lstrip()
        if not text:
            return
        self._trim = False
        self._said = self._said or not reasoning
        self._spoke = self._spoke or not (reasoning or text.isspace())
        self._deltas.append(ReplyDelta(reasoning=text) if reasoning else ReplyDelta(content=text))


def _new_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
