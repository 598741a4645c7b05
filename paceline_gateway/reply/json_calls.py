"""Calls of functions in a reply, character by character, in the ways that templates write them.

White space is free wherever a format's own text is matched: models write more or less of it than their templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

from paceline_gateway.reply.call_reader import NAME, CallReader, ObjectScan, tight
from paceline_gateway.reply.format import ARGUMENT_KEYS, CallFormat


class NamedCalls(CallReader):
    """Name and arguments stand in text of the format's own: `[TOOL_CALLS]name[ARGS]{…}`."""

    def _between(self, character: str) -> None:
        literal = tight(self._form.between)
        found = self._found(character, (literal,)) if literal else literal
        if found is None:
            self._refuse()
        elif found or not literal:
            self._expect(self._open, "")
            if not literal:
                self._open(character)

    def _closed(self) -> None:
        if not tight(self._form.closing):
            self._leave("")
        self._expect(self._after, "")

    def _after(self, character: str) -> None:
        following = tight(self._form.following or "")
        found = self._found(character, [text for text in (following, tight(self._form.closing)) if text])
        if found is None:
            self._leave(self._raw)
        elif found and found == following:
            self._expect(self._named, "")
        elif found:
            self._leave("")


class JsonCalls(CallReader):
    """A call is a JSON object with a name, or an item of a list of them; other orders of keys are read at its end."""

    def __init__(self, form: CallFormat, functions: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(form, functions, new_id)
        objects = ('{"name":"', '{"type":"function","name":"')
        self._first = tuple(f"[{start}" if form.is_list else start for start in objects)
        self._next = objects
        self._closing = tight(form.closing).lstrip("}]")
        self._bare = False

    def markers(self, *, first: bool) -> tuple[str, ...]:  # noqa: D102
        bare = ("{",) if first and not self._form.marker else ()
        return self._form.markers + bare

    @property
    def is_marked(self) -> bool:  # noqa: D102
        return not self._bare

    def begin(self, held: str, marker: str) -> None:  # noqa: D102
        super().begin(held, marker)
        self._bare = marker == "{"
        self._body = "{" if self._bare else ""
        self._openings = self._first
        self._expect(self._head, self._body)

    def _head(self, character: str) -> None:
        self._body += character
        found = self._found(character, self._openings)
        if found:
            self._expect(self._named, "")
        elif found is None:
            self._read_whole()

    def _named(self, character: str) -> None:
        self._body += character
        if NAME.fullmatch(character):
            self._name += character
            return
        offered = not self._bare or self._name in self._functions
        self._expect(self._between, character)
        if character != '"' or not self._name or not offered:
            self._read_whole()

    def _between(self, character: str) -> None:
        self._body += character
        found = self._found(character, [f'","{key}":' for key in ARGUMENT_KEYS])
        if found:
            self._expect(self._open, "")
        elif found is None:
            self._read_whole()

    def _open(self, character: str) -> None:
        if character == "{" or character.isspace():
            super()._open(character)
        else:
            self._body += character
            self._read_whole()

    def _closed(self) -> None:
        self._scan = ObjectScan(depth=1)
        self._state = self._rest

    def _rest(self, character: str) -> None:
        """Further keys of the object, which mean nothing; most have none."""
        if self._scan.push(character):
            self._end()
        elif self._raw.strip() == character and character != ",":
            self._leave(self._raw)

    def _end(self) -> None:
        if not self._form.is_list and not self._closing:
            self._leave("")
        self._expect(self._after, "")

    def _after(self, character: str) -> None:
        ends = ("]", ",") if self._form.is_list else (self._closing,)
        found = self._found(character, ends)
        if found is None:
            self._leave(self._raw)
        elif found == ",":
            self._raw, self._body, self._openings = "", "", self._next
            self._expect(self._head, "")
        elif found:
            self._leave("")

    def _read_whole(self) -> None:
        """Not the usual order of keys: read to the end of the JSON, if a marker promises that it is a call."""
        body, self._body = self._body, ""
        if self._bare:
            return self._refuse()
        self._scan = ObjectScan()
        self._state = self._whole
        for character in body:
            if self._state == self._whole:
                self._whole(character)
        return None

    def _whole(self, character: str) -> None:
        self._body += character
        closed = self._scan.push(character)
        if self._scan.depth == 0 and not closed and not character.isspace():
            self._refuse()
        elif closed:
            self._take_whole()

    def _take_whole(self) -> None:
        calls = list(_calls_of(self._body))
        if not calls:
            return self._refuse()
        for name, arguments in calls:
            self._call(name, arguments)
        self._raw = ""
        if self._body.lstrip().startswith("["):
            self._leave("")
        return self._end()


def _calls_of(body: str) -> Iterator[tuple[str, str]]:
    """Names and arguments of the calls that a JSON text has; none, if any of them is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return
    found = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
    if all(found):
        yield from (call for call in found if call)


def _call_of(item: Any) -> tuple[str, str] | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments: Any = next((item[key] for key in ARGUMENT_KEYS if item.get(key) is not None), {})
    if isinstance(arguments, str):
        return item["name"], arguments
    return (item["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
