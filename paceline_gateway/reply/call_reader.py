"""What all readers of calls have in common: the function's name, the text around it, JSON arguments as they come."""

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
        self._after_backslash = False

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

    def run(self, text: str, position: int) -> int:
        """Take characters up to the bracket that closes the value; return that bracket's position."""
        while position < len(text) and (self._in_string or self.depth != 1 or text[position] not in "}]"):
            self.push(text[position])
            position += 1
        return position

    def _within_string(self, character: str) -> None:
        if self._after_backslash:
            self._after_backslash = False
        elif character == "\\":
            self._after_backslash = True
        elif character == '"':
            self._in_string = False


class CallReader:
    """Reads calls from a marker on until `is_done`; `remainder` is text behind them, to be read as content.

    `_raw` is the text since the last delta, marker included. It is content if this turns out to be no call. `_state`
    is the method that takes the next character.
    """

    def __init__(self, form: CallFormat, functions: Collection[str], new_id: Callable[[], str]) -> None:
        self.is_done = True
        self.remainder = ""
        self._form = form
        self._functions = frozenset(functions)
        self._new_id = new_id
        self._index = -1
        self._raw = self._prefix = self._name = ""
        self._scan = ObjectScan()
        self._deltas: list[ReplyDelta] = []
        self._state: Callable[[str], None] = self._read_arguments

    def markers(self, *, first: bool) -> tuple[str, ...]:
        """Return what a call may begin with; `first`: no content has come yet."""
        return self._form.markers

    def begin(self, text: str, marker: str) -> None:
        """Begin at a marker; `text` is the marker with the white space in front of it."""
        self.is_done, self.remainder, self._raw = False, "", text
        self._expect(self._read_name, "")

    def push(self, character: str) -> list[ReplyDelta]:
        """Take one character."""
        self._raw += character
        self._state(character)
        deltas, self._deltas = self._deltas, []
        return deltas

    def run(self, text: str, position: int) -> tuple[int, list[ReplyDelta]]:
        """Take what is certain to be arguments at once; return where the rest begins, and the deltas."""
        if self.is_done or self._state != self._read_arguments:
            return position, []
        end = self._scan.run(text, position)
        arguments = text[position:end]
        return end, [ReplyDelta(tool_call=ToolCallDelta(self._index, arguments=arguments))] if arguments else []

    @property
    def is_marked(self) -> bool:
        """Whether the text so far can be nothing but the start of a call."""
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the last call's arguments are complete."""
        return self._state in (self._read_further_keys, self._read_closing)

    def finish(self, *, is_call: bool = False) -> list[ReplyDelta]:
        """End the reply: what isn't a call yet is content, and a call that is cut off stays as it came.

        Args:
            is_call: whether text that isn't a call yet would have become one. It is dropped then.
        """
        self.is_done = True
        has_call = is_call or self.is_whole or self._state == self._read_arguments
        return [ReplyDelta(content=self._raw)] if self._raw and not has_call else []

    def _read_name(self, character: str) -> None:
        """Take a name's characters, up to the first that can't be one."""
        if NAME.fullmatch(character):
            self._name += character
        elif self._name or not character.isspace():
            self._expect(self._read_name_suffix, "")
            if self._name:
                self._read_name_suffix(character)
            else:
                self._refuse()

    def _read_name_suffix(self, character: str) -> None:
        raise NotImplementedError

    def _read_further_keys(self, character: str) -> None:
        raise NotImplementedError

    def _read_closing(self, character: str) -> None:
        raise NotImplementedError

    def _open_arguments(self, character: str) -> None:
        """Take the first character of arguments."""
        if character == "{":
            self._call(self._name)
            self._scan = ObjectScan()
            self._state = self._read_arguments
            self._read_arguments(character)
        elif not character.isspace():
            self._refuse()

    def _read_arguments(self, character: str) -> None:
        self._raw = ""
        self._deltas.append(ReplyDelta(tool_call=ToolCallDelta(self._index, arguments=character)))
        if self._scan.push(character):
            self._end_arguments()

    def _end_arguments(self) -> None:
        """Go on behind arguments that are complete."""
        raise NotImplementedError

    def _call(self, name: str, arguments: str = "") -> None:
        self._index += 1
        self._deltas.append(ReplyDelta(tool_call=ToolCallDelta(self._index, self._new_id(), name, arguments)))

    def _expect(self, state: Callable[[str], None], prefix: str) -> None:
        self._state, self._prefix = state, prefix
        if state == self._read_name:
            self._name = ""

    def _refuse(self) -> None:
        """Give all text back as content: this was no call."""
        self._deltas.append(ReplyDelta(content=self._raw))
        self._leave("")

    def _leave(self, remainder: str) -> None:
        self.is_done, self.remainder, self._raw = True, remainder, ""

    def _match(self, character: str, literals: Collection[str]) -> str | None:
        """Return the literal that is complete; "": one may still come; None: none can."""
        if not character.isspace():
            self._prefix += character
        if self._prefix in literals:
            return self._prefix
        return "" if any(literal.startswith(self._prefix) for literal in literals) else None


def without_space(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())
