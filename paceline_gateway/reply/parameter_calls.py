"""Calls whose arguments a reply writes one by one, read character by character and told as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from paceline_gateway.reply.call_reader import CallReader, tight
from paceline_gateway.reply.deltas import ReplyDelta, ToolCallDelta
from paceline_gateway.reply.format import CallFormat
from paceline_gateway.reply.parameter_values import STRING, json_of, parameters_of, types_of

MAX_NAME = 256
"""Characters of a parameter's name; what is longer is none."""


class ParameterCalls(CallReader):
    """The call is told once its function's name is whole. A string streams; another value is told when it is whole.

    Behind the arguments the call is over: whatever else stands there is content.
    """

    def __init__(self, form: CallFormat, functions: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(form, functions, new_id)
        assert form.each is not None, "the arguments are written one by one"
        self._schemas: Mapping[str, Any] = functions if isinstance(functions, Mapping) else {}
        self._head = tight(form.opening.removeprefix(form.marker))
        self._before_name, self._before_value = tight(form.each.before_name), form.each.before_value.rstrip()
        self._newline = form.each.before_value[len(self._before_value) :]
        behind = form.each.behind_value
        self._end = behind.strip()
        self._ends = (behind[: len(behind) - len(behind.lstrip())] + self._end, self._end)
        self._over, *after = form.closing.split()
        self._after_over = "".join(after)
        self._types: frozenset[str] = frozenset()
        self._separator = self._held = self._value = self._skipped = ""
        self._told = False

    def begin(self, held: str, marker: str) -> None:  # noqa: D102
        super().begin(held, marker)
        self._told, self._separator = False, ""
        if self._head:
            self._expect(self._opening, "")

    def finish(self, *, is_call: bool = False) -> list[ReplyDelta]:  # noqa: D102
        self.done = True
        if not self._told:
            return [ReplyDelta(content=self._raw)] if self._raw and not is_call else []
        if self._state == self._string:
            self._tell(_inside_quotes(self._held))
        elif self._state == self._other:
            self._tell(self._value + self._held)
        taken, self._deltas = self._deltas, []
        return taken

    def _opening(self, character: str) -> None:
        found = self._found(character, (self._head,))
        if found is None:
            self._refuse()
        elif found:
            self._expect(self._named, "")

    def _between(self, character: str) -> None:
        literal = tight(self._form.between)
        found = self._found(character, (literal,)) if literal else literal
        if found is None:
            self._refuse()
            return
        if not found and literal:
            return
        self._call(self._name, "{")
        self._told, self._raw = True, ""
        self._expect(self._next, "")
        if not literal:
            self._raw = character
            self._next(character)

    def _next(self, character: str) -> None:
        """A further argument, or the end of them."""
        found = self._found(character, (self._before_name, self._over))
        if found == self._before_name:
            self._expect(self._parameter, "")
        elif found == self._over:
            self._tell("}")
            self._expect(self._after, "")
            if not self._after_over:
                self._leave("")
        elif found is None:
            self._tell_and_leave("}")

    def _parameter(self, character: str) -> None:
        self._seen += character
        if self._seen.endswith(self._before_value):
            name = self._seen.removesuffix(self._before_value).strip()
            self._types = types_of(parameters_of(self._schemas.get(self._name)).get(name))
            is_string = self._types == STRING
            self._tell(f"{self._separator}{json.dumps(name, ensure_ascii=False)}: " + '"' * is_string)
            self._separator, self._held, self._value, self._skipped = ", ", "", "", ""
            self._state = self._string if is_string else self._other
        elif len(self._seen) > MAX_NAME:
            self._tell_and_leave("}")

    def _string(self, character: str) -> None:
        text, ended = self._text(character)
        self._tell(_inside_quotes(text) + '"' * ended)
        if ended:
            self._expect(self._next, "")

    def _other(self, character: str) -> None:
        text, ended = self._text(character)
        self._value += text
        if ended:
            self._tell(json_of(self._value, self._types))
            self._expect(self._next, "")

    def _text(self, character: str) -> tuple[str, bool]:
        """What of a value has become certain, and whether it has ended.

        White space that the template writes around it is no part of it, once.
        """
        if self._newline and self._skipped != self._newline and self._newline.startswith(self._skipped + character):
            self._skipped += character
            return "", False
        self._skipped = self._newline
        self._held += character
        text = ""
        while self._held:
            if self._held in self._ends:
                return text, True
            if any(end.startswith(self._held) for end in self._ends):
                break
            text, self._held = text + self._held[0], self._held[1:]
        return text, False

    def _after(self, character: str) -> None:
        found = self._found(character, (self._after_over,))
        if found is None:
            self._leave(self._raw)
        elif found:
            self._leave("")

    def _tell_and_leave(self, arguments: str) -> None:
        again = self._raw
        self._tell(arguments)
        self._leave(again)

    def _tell(self, arguments: str) -> None:
        """A piece of the call's arguments; what made it is no content any more."""
        if arguments:
            self._deltas.append(ReplyDelta(tool_call=ToolCallDelta(self._index, arguments=arguments)))
        self._raw = ""


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
