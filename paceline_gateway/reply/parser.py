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
from paceline_gateway.reply.deltas import ReplyDelta, ReplyParser, join_deltas
from paceline_gateway.reply.format import CallFormat, ReasoningTags, ReplyFormat
from paceline_gateway.reply.json_calls import JsonCalls, NamedCalls
from paceline_gateway.reply.parameter_calls import ParameterCalls

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""What Mistral's templates demand of an id; 10^16 of them."""
MAX_PENDING_SPACE = 256
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
    """Build the parser of one reply.

    Args:
        form: the model's format.
        functions: names that may be called; none: the text of a call is content.
        in_reasoning: whether the template opened a span of reasoning (`opens_reasoning`).
        must_call: whether the reply, after its reasoning, consists of calls alone.
        calls_first: whether no call follows content: what looks like one there is content, too.
        new_id: makes the id of a call.
    """
    calls = form.calls if functions else None
    if calls is None and form.reasoning is None:
        return PlainReply()
    reader = call_reader(calls, functions, new_id or _new_id) if calls else None
    return MarkedReply(
        reader, form.reasoning, in_reasoning=in_reasoning, must_call=must_call, calls_first=calls_first
    )


def call_reader(form: CallFormat, functions: Collection[str], new_id: Callable[[], str]) -> CallReader:
    """Build the reader of calls in this format.

    Arguments that are written one by one have the right types where `functions` maps names to schemas.
    """
    if form.parameter is not None:
        return ParameterCalls(form, functions, new_id)
    return (JsonCalls if form.is_json else NamedCalls)(form, functions, new_id)


class PlainReply:
    """The parser for a model that writes nothing but content."""

    has_partial_call = False

    def feed(self, text: str) -> list[ReplyDelta]:
        """Return the text as it comes."""
        return [ReplyDelta(content=text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[ReplyDelta]:
        """Return nothing: no text was held back."""
        return []


class MarkedReply:
    """The parser for a model whose calls or reasoning have markers.

    It goes from character to character, so the cut into pieces can't matter. `_state` is the method that takes the
    next character: `_content`, `_reasoning` or `_call`.
    """

    def __init__(
        self,
        reader: CallReader | None,
        tags: ReasoningTags | None,
        *,
        in_reasoning: bool,
        must_call: bool,
        calls_first: bool,
    ) -> None:
        self.has_partial_call = False
        self._reader = reader
        self._tags = tags
        self._must_call, self._calls_first = must_call, calls_first
        self._has_content = False
        self._deltas: list[ReplyDelta] = []
        self._pending_text = ""
        """Possible start of a marker, with the white space in front of it."""
        self._plain_text = re.compile(rf"[^\s{re.escape(''.join(self._beginnings()))}]+")
        self._is_past_reasoning = False
        self._trim = in_reasoning
        self._state = self._reasoning if in_reasoning else self._content

    def feed(self, text: str) -> list[ReplyDelta]:
        """Return the deltas that this piece makes certain."""
        position = 0
        while position < len(text):
            position = self._run(text, position)
            if position < len(text):
                self._state(text[position])
                position += 1
        return self._take_deltas()

    def finish(self, *, is_cut: bool = False) -> list[ReplyDelta]:
        """End the reply and return what was held back."""
        is_call_start = is_cut and self._must_call and self._state == self._content
        if self._reader is not None and self._state == self._call:
            self.has_partial_call = is_cut and not self._reader.is_whole
            self._deltas += self._reader.finish(is_call=is_cut and (self._must_call or self._reader.is_marked))
        elif not is_call_start and (not self._trim or self._pending_text.strip()):
            self._emit(self._pending_text, reasoning=self._state == self._reasoning)
        self._pending_text = ""
        return self._take_deltas()

    def _run(self, text: str, position: int) -> int:
        """Take a run of characters at once: no marker begins with them, or they are arguments."""
        if self._reader is not None and self._state == self._call:
            end, deltas = self._reader.run(text, position)
            self._deltas += deltas
            return end
        match = None if self._pending_text or self._trim else self._plain_text.match(text, position)
        if match is None:
            return position
        self._emit(match[0], reasoning=self._state == self._reasoning)
        return match.end()

    def _take_deltas(self) -> list[ReplyDelta]:
        deltas, self._deltas = join_deltas(self._deltas), []
        return deltas

    def _content(self, character: str) -> None:
        marker = self._marker(character, self._content_markers(), reasoning=False)
        if marker is None:
            return
        text, self._pending_text = self._pending_text, ""
        if self._tags is not None and marker == self._tags.opening:
            self._state, self._trim = self._reasoning, True
        elif self._reader is not None:
            self._reader.begin(text, marker)
            self._state = self._call

    def _reasoning(self, character: str) -> None:
        assert self._tags is not None, "only a model with tags reasons"
        if self._marker(character, (self._tags.closing,), reasoning=True) is not None:
            self._pending_text = ""
            self._state, self._trim, self._is_past_reasoning = self._content, True, True

    def _call(self, character: str) -> None:
        assert self._reader is not None, "only a model with calls gets here"
        deltas = self._reader.push(character)
        self._deltas += deltas
        self._has_content = self._has_content or any(delta.content for delta in deltas)
        if self._reader.is_done:
            self._is_past_reasoning, self._trim = True, False
            self._state = self._content
            for character in self._reader.remainder:
                self._state(character)

    def _beginnings(self) -> set[str]:
        """Return the first characters of all markers."""
        calls = self._reader.markers(first=True) if self._reader else ()
        tags = (self._tags.opening, self._tags.closing) if self._tags else ()
        return {marker[0] for marker in (*calls, *tags)}

    def _content_markers(self) -> tuple[str, ...]:
        """Return the markers that may come now.

        Reasoning comes first in a reply, and so does a call that nothing but its JSON marks.
        """
        reasoning = (self._tags.opening,) if self._tags and not self._is_past_reasoning else ()
        reader = None if self._calls_first and self._has_content else self._reader
        calls = reader.markers(first=not self._is_past_reasoning or self._trim) if reader else ()
        return reasoning + calls

    def _marker(self, character: str, markers: Collection[str], *, reasoning: bool) -> str | None:
        """Hold back what may become a marker and emit what can't; return a marker that is complete."""
        self._pending_text += character
        while self._pending_text:
            start = self._pending_text.lstrip()
            if start in markers:
                return start
            if any(marker.startswith(start) for marker in markers) and len(self._pending_text) < MAX_PENDING_SPACE:
                return None
            self._emit(self._pending_text[0], reasoning=reasoning)
            self._pending_text = self._pending_text[1:]
        return None

    def _emit(self, text: str, *, reasoning: bool) -> None:
        if self._trim:
            text = text.lstrip()
        if not text:
            return
        self._trim = False
        self._is_past_reasoning = self._is_past_reasoning or not reasoning
        self._has_content = self._has_content or not (reasoning or text.isspace())
        self._deltas.append(ReplyDelta(reasoning=text) if reasoning else ReplyDelta(content=text))


def _new_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
