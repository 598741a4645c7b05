"""Calls of functions whose arguments a reply writes as one JSON object, read character by character.

White space is free wherever a format's own text is matched: models write more or less of it than their templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

from paceline_gateway.reply.call_reader import NAME, CallReader, ObjectScan, without_space
from paceline_gateway.reply.format import ARGUMENT_KEYS, CallFormat


class NamedCalls(CallReader):
    """Reads calls whose name and arguments stand in text of the format's own: `[TOOL_CALLS]name[ARGS]{…}`."""

    def _read_name_suffix(self, character: str) -> None:
        literal = without_space(self._form.name_suffix)
        match = self._match(character, (literal,)) if literal else literal
        if match is None:
            self._refuse()
        elif match or not literal:
            self._expect(self._open_arguments, "")
            if not literal:
                self._open_arguments(character)

    def _end_arguments(self) -> None:
        if not without_space(self._form.closing):
            self._leave("")
        self._expect(self._read_closing, "")

    def _read_closing(self, character: str) -> None:
        separator, closing = without_space(self._form.separator or ""), without_space(self._form.closing)
        match = self._match(character, [text for text in (separator, closing) if text])
        if match is None:
            self._leave(self._raw)
        elif match and match == separator:
            self._expect(self._read_name, "")
        elif match:
            self._leave("")


class JsonCalls(CallReader):
    """Reads calls that are JSON objects with a name, or a list of them.

    The usual order of keys is read as it comes. Any other is read once the JSON has ended.
    """

    def __init__(self, form: CallFormat, functions: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(form, functions, new_id)
        objects = ('{"name":"', '{"type":"function","name":"')
        self._first_openings = tuple(f"[{start}" if form.is_list else start for start in objects)
        self._next_openings = objects
        self._closing = without_space(form.closing).lstrip("}]")
        self._is_bare = False

    def markers(self, *, first: bool) -> tuple[str, ...]:  # noqa: D102
        brackets = ("{",) if first and not self._form.marker else ()
        return self._form.markers + brackets

    @property
    def is_marked(self) -> bool:  # noqa: D102
        return not self._is_bare

    def begin(self, text: str, marker: str) -> None:  # noqa: D102
        super().begin(text, marker)
        self._is_bare = marker == "{"
        self._body = "{" if self._is_bare else ""
        self._openings = self._first_openings
        self._expect(self._read_head, self._body)

    def _read_head(self, character: str) -> None:
        self._body += character
        match = self._match(character, self._openings)
        if match:
            self._expect(self._read_name, "")
        elif match is None:
            self._fall_back()

    def _read_name(self, character: str) -> None:
        self._body += character
        if NAME.fullmatch(character):
            self._name += character
            return
        is_offered = not self._is_bare or self._name in self._functions
        self._expect(self._read_name_suffix, character)
        if character != '"' or not self._name or not is_offered:
            self._fall_back()

    def _read_name_suffix(self, character: str) -> None:
        self._body += character
        match = self._match(character, [f'","{key}":' for key in ARGUMENT_KEYS])
        if match:
            self._expect(self._open_arguments, "")
        elif match is None:
            self._fall_back()

    def _open_arguments(self, character: str) -> None:
        if character == "{" or character.isspace():
            super()._open_arguments(character)
        else:
            self._body += character
            self._fall_back()

    def _end_arguments(self) -> None:
        self._scan = ObjectScan(depth=1)
        self._state = self._read_further_keys

    def _read_further_keys(self, character: str) -> None:
        """Skip further keys of the object, which mean nothing."""
        if self._scan.push(character):
            self._end_object()
        elif self._raw.strip() == character and character != ",":
            self._leave(self._raw)

    def _end_object(self) -> None:
        if not self._form.is_list and not self._closing:
            self._leave("")
        self._expect(self._read_closing, "")

    def _read_closing(self, character: str) -> None:
        ends = ("]", ",") if self._form.is_list else (self._closing,)
        match = self._match(character, ends)
        if match is None:
            self._leave(self._raw)
        elif match == ",":
            self._raw, self._body, self._openings = "", "", self._next_openings
            self._expect(self._read_head, "")
        elif match:
            self._leave("")

    def _fall_back(self) -> None:
        """Read an unusual order of keys to the end of the JSON, if a marker promises that it is a call."""
        body, self._body = self._body, ""
        if self._is_bare:
            return self._refuse()
        self._scan = ObjectScan()
        self._state = self._read_whole
        for character in body:
            if self._state == self._read_whole:
                self._read_whole(character)
        return None

    def _read_whole(self, character: str) -> None:
        self._body += character
        is_end = self._scan.push(character)
        if self._scan.depth == 0 and not is_end and not character.isspace():
            self._refuse()
        elif is_end:
            self._take_calls()

    def _take_calls(self) -> None:
        calls = list(_calls_of(self._body))
        if not calls:
            return self._refuse()
        for name, arguments in calls:
            self._call(name, arguments)
        self._raw = ""
        if self._body.lstrip().startswith("["):
            self._leave("")
        return self._end_object()


def _calls_of(body: str) -> Iterator[tuple[str, str]]:
    """Yield names and arguments of the calls that a JSON text has; none if any item is no call."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return
    calls = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
    if all(calls):
        yield from (call for call in calls if call)


def _call_of(item: Any) -> tuple[str, str] | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments: Any = next((item[key] for key in ARGUMENT_KEYS if item.get(key) is not None), {})
    if isinstance(arguments, str):
        return item["name"], arguments
    return (item["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
