"""What all readers of calls have in common: a name, what stands around it, and JSON arguments as they come."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from paceline_gateway.reply.deltas import ReplyDelta, ToolCallDelta
from paceline_gateway.reply.format import CallFormat

NAME = re.compile(r"[A-Za-z0-9_.\-]")
"""A character of a function's name."""


class ObjectScan:
    """Follows one JSON value that began with a bracket; `depth` counts the brackets that are open."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._in_string = False
        self._escaped = False

    def push(self, character: str) -> bool:
        """Take one character; True if it closed the last bracket."""
        if self._in_string:
            self._within_string(character)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            return self.depth == 0
        return False

    def run(self, text: str, at: int) -> int:
        """Take characters up to the bracket that closes the last one, which is left; returns where that is."""
        while at < len(text) and (self._in_string or self.depth != 1 or text[at] not in "}]"):
            self.push(text[at])
            at += 1
        return at

    def _within_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


class CallReader:
    """Takes over at a marker and gives back once `done`: `again` is text that is the content's then.

    `_raw` is what has been read since the last delta, marker included: content, should this be no call.
    """

    def __init__(self, form: CallFormat, functions: Collection[str], new_id: Callable[[], str]) -> None:
        self.done = True
        self.again = ""
        self._form = form
        self._functions = frozenset(functions)
        self._new_id = new_id
        self._index = -1
        self._raw = self._seen = self._name = ""
        self._scan = ObjectScan()
        self._deltas: list[ReplyDelta] = []
        self._state: Callable[[str], None] = self._arguments

    def markers(self, *, first: bool) -> tuple[str, ...]:
        """What a call may begin with; `first`: no content has come yet."""
        return self._form.markers

    def begin(self, held: str, marker: str) -> None:
        """A marker has come; `held` has it and the white space in front of it."""
        self.done, self.again, self._raw = False, "", held
        self._expect(self._named, "")

    def push(self, character: str) -> list[ReplyDelta]:
        """Take one character."""
        self._raw += character
        self._state(character)
        taken, self._deltas = self._deltas, []
        return taken

    def run(self, text: str, at: int) -> tuple[int, list[ReplyDelta]]:
        """Take what is certain to be arguments, as `push` would, but at once; returns where the rest begins."""
        if self.done or self._state != self._arguments:
            return at, []
        end = self._scan.run(text, at)
        return end, [ReplyDelta(tool_call=ToolCallDelta(self._index, arguments=text[at:end]))] if end > at else []

    @property
    def is_marked(self) -> bool:
        """Whether what has been read can be nothing but the beginning of a call."""
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the last call's arguments have ended."""
        return self._state in (self._rest, self._after)

    def finish(self, *, is_call: bool = False) -> list[ReplyDelta]:
        """The reply has ended: what isn't a call yet is content; a call that is cut off stays as it came.

        Args:
            is_call: what isn't one yet was cut, and would have become one: it is nothing then.
        """
        self.done = True
        nothing = is_call or not self._raw or self.is_whole or self._state == self._arguments
        return [] if nothing else [ReplyDelta(content=self._raw)]

    def _named(self, character: str) -> None:
        """A name's characters, up to the first that can't be one."""
        if NAME.fullmatch(character):
            self._name += character
        elif self._name or not character.isspace():
            self._expect(self._between, "")
            if self._name:
                self._between(character)
            else:
                self._refuse()

    def _between(self, character: str) -> None:
        raise NotImplementedError

    def _rest(self, character: str) -> None:
        raise NotImplementedError

    def _after(self, character: str) -> None:
        raise NotImplementedError

    def _open(self, character: str) -> None:
        """The first character of arguments."""
        if character == "{":
            self._call(self._name)
            self._scan = ObjectScan()
            self._state = self._arguments
            self._arguments(character)
        elif not character.isspace():
            self._refuse()

    def _arguments(self, character: str) -> None:
        self._raw = ""
        self._deltas.append(ReplyDelta(tool_call=ToolCallDelta(self._index, arguments=character)))
        if self._scan.push(character):
            self._closed()

    def _closed(self) -> None:
        """The arguments are whole."""
        raise NotImplementedError

    def _call(self, name: str, arguments: str = "") -> None:
        self._index += 1
        self._deltas.append(ReplyDelta(tool_call=ToolCallDelta(self._index, self._new_id(), name, arguments)))

    def _expect(self, state: Callable[[str], None], seen: str) -> None:
        self._state, self._seen = state, seen
        if state == self._named:
            self._name = ""

    def _refuse(self) -> None:
        """This was no call: it is content, whole."""
        self._deltas.append(ReplyDelta(content=self._raw))
        self._leave("")

    def _leave(self, again: str) -> None:
        self.done, self.again, self._raw = True, again, ""

    def _found(self, character: str, literals: Collection[str]) -> str | None:
        """The literal that has been read; "" while one still may be, None once none can."""
        if not character.isspace():
            self._seen += character
        if self._seen in literals:
            return self._seen
        return "" if any(literal.startswith(self._seen) for literal in literals) else None


def tight(text: str) -> str:
    """Without white space."""
    return "".join(text.split())
