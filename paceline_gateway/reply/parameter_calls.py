"""Calls whose arguments a reply writes one by one, read character by character and sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from paceline_gateway.reply.call_reader import CallReader, without_space
from paceline_gateway.reply.deltas import ReplyDelta, ToolCallDelta
from paceline_gateway.reply.format import CallFormat
from paceline_gateway.reply.parameter_values import STRING, json_of, parameters_of, types_of

MAX_NAME = 256
"""Characters of a parameter's name; what is longer is none."""


class ParameterCalls(CallReader):
    """Reads calls parameter by parameter.

    A call is emitted once its function's name is complete. A string streams; any other value is emitted when it is
    complete. The call is over behind its arguments: whatever else stands there is content.
    """

    def __init__(self, form: CallFormat, functions: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(form, functions, new_id)
        assert form.parameter is not None, "the arguments are written one by one"
        self._schemas: Mapping[str, Any] = functions if isinstance(functions, Mapping) else {}
        self._head = without_space(form.opening.removeprefix(form.marker))
        self._name_prefix = without_space(form.parameter.name_prefix)
        self._value_prefix = form.parameter.value_prefix.rstrip()
        self._newline = form.parameter.value_prefix[len(self._value_prefix) :]
        suffix = form.parameter.value_suffix
        self._value_end = suffix.strip()
        self._value_ends = (suffix[: len(suffix) - len(suffix.lstrip())] + self._value_end, self._value_end)
        self._arguments_end, *rest = form.closing.split()
        self._call_end = "".join(rest)
        self._types: frozenset[str] = frozenset()
        self._separator = self._pending_text = self._value = self._newline_prefix = ""
        self._has_call = False

    def begin(self, text: str, marker: str) -> None:  # noqa: D102
        super().begin(text, marker)
        self._has_call, self._separator = False, ""
        if self._head:
            self._expect(self._read_opening, "")

    def finish(self, *, is_call: bool = False) -> list[ReplyDelta]:  # noqa: D102
        self.is_done = True
        if not self._has_call:
            return [ReplyDelta(content=self._raw)] if self._raw and not is_call else []
        if self._state == self._read_string:
            self._emit(_inside_quotes(self._pending_text))
        elif self._state == self._read_other:
            self._emit(self._value + self._pending_text)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read_opening(self, character: str) -> None:
        match = self._match(character, (self._head,))
        if match is None:
            self._refuse()
        elif match:
            self._expect(self._read_name, "")

    def _read_name_suffix(self, character: str) -> None:
        literal = without_space(self._form.name_suffix)
        match = self._match(character, (literal,)) if literal else literal
        if match is None:
            self._refuse()
            return
        if not match and literal:
            return
        self._call(self._name, "{")
        self._has_call, self._raw = True, ""
        self._expect(self._read_next, "")
        if not literal:
            self._raw = character
            self._read_next(character)

    def _read_next(self, character: str) -> None:
        """Look for a further argument, or for the end of them."""
        match = self._match(character, (self._name_prefix, self._arguments_end))
        if match == self._name_prefix:
            self._expect(self._read_parameter_name, "")
        elif match == self._arguments_end:
            self._emit("}")
            self._expect(self._read_closing, "")
            if not self._call_end:
                self._leave("")
        elif match is None:
            self._emit_and_leave("}")

    def _read_parameter_name(self, character: str) -> None:
        self._prefix += character
        if self._prefix.endswith(self._value_prefix):
            name = self._prefix.removesuffix(self._value_prefix).strip()
            self._types = types_of(parameters_of(self._schemas.get(self._name)).get(name))
            is_string = self._types == STRING
            self._emit(f"{self._separator}{json.dumps(name, ensure_ascii=False)}: " + '"' * is_string)
            self._separator, self._pending_text, self._value, self._newline_prefix = ", ", "", "", ""
            self._state = self._read_string if is_string else self._read_other
        elif len(self._prefix) > MAX_NAME:
            self._emit_and_leave("}")

    def _read_string(self, character: str) -> None:
        text, is_end = self._value_text(character)
        self._emit(_inside_quotes(text) + '"' * is_end)
        if is_end:
            self._expect(self._read_next, "")

    def _read_other(self, character: str) -> None:
        text, is_end = self._value_text(character)
        self._value += text
        if is_end:
            self._emit(json_of(self._value, self._types))
            self._expect(self._read_next, "")

    def _value_text(self, character: str) -> tuple[str, bool]:
        """Return the text of a value that is certain now, and whether the value has ended.

        White space that the template writes around a value is skipped, once.
        """
        prefix = self._newline_prefix + character
        if self._newline_prefix != self._newline and self._newline.startswith(prefix):
            self._newline_prefix = prefix
            return "", False
        self._newline_prefix = self._newline
        self._pending_text += character
        text = ""
        while self._pending_text:
            if self._pending_text in self._value_ends:
                return text, True
            if any(end.startswith(self._pending_text) for end in self._value_ends):
                break
            text, self._pending_text = text + self._pending_text[0], self._pending_text[1:]
        return text, False

    def _read_closing(self, character: str) -> None:
        match = self._match(character, (self._call_end,))
        if match is None:
            self._leave(self._raw)
        elif match:
            self._leave("")

    def _emit_and_leave(self, arguments: str) -> None:
        remainder = self._raw
        self._emit(arguments)
        self._leave(remainder)

    def _emit(self, arguments: str) -> None:
        """Emit a piece of the call's arguments; the text behind it is no content any more."""
        if arguments:
            self._deltas.append(ReplyDelta(tool_call=ToolCallDelta(self._index, arguments=arguments)))
        self._raw = ""


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
