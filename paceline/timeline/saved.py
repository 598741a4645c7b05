"""Round records as JSON, and saved responses that have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.given_files import json_value, read_text
from paceline.protocol.records import RoundRecord, StepTimings

EXTENSION = "paceline"
ROUNDS = "rounds"
_SSE = "data:"
_LIMIT = (
    f'a response whose "{EXTENSION}" has "{ROUNDS}": of HTTP with {{"{EXTENSION}": {{"{ROUNDS}": true}}}}, '
    "streamed or not, or of generate --json --rounds"
)
MAX_NUMBER = (1 << 64) - 1
"""Largest number in a record: that of the protocol's widest field, which a float holds, too."""
_NUMBERS = {"int": int, "float": float}
_Record = TypeVar("_Record", RoundRecord, StepTimings)


def rounds_json(records: Iterable[RoundRecord]) -> list[dict[str, Any]]:
    """The records, each as an object of its fields."""
    return [dataclasses.asdict(record) for record in records]


def read_rounds(file: Path) -> list[RoundRecord]:
    """The round records of a saved response: JSON, lines of JSON, or an event stream. The last ones count.

    Raises:
        InvalidInput: naming the file, or the field of a record.
    """
    responses = [
        rounds for document in _documents(read_text("request", file)) if (rounds := _rounds_of(document)) is not None
    ]
    if not responses:
        raise InvalidInput.of("request", str(file), _LIMIT)
    return [_record(RoundRecord, each, f"{ROUNDS}[{number}]") for number, each in enumerate(responses[-1])]


def _documents(text: str) -> Iterator[object]:
    """Every JSON document in a text."""
    try:
        yield json_value("request", text)
        return
    except InvalidInput:
        lines = (line.removeprefix(_SSE).strip() for line in text.splitlines())
    for line in lines:
        try:
            yield json_value("request", line)
        except InvalidInput:  # an empty line, an event's name, [DONE]
            continue


def _rounds_of(document: object) -> list[object] | None:
    extension = document.get(EXTENSION) if isinstance(document, dict) else None
    rounds = extension.get(ROUNDS) if isinstance(extension, dict) else None
    return rounds if isinstance(rounds, list) and rounds else None


def _record(kind: type[_Record], document: object, where: str) -> _Record:
    """One record. Fields that this version doesn't know are ignored; missing ones have their defaults."""
    if not isinstance(document, dict):
        raise InvalidInput.of(where, document, "an object")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = f"{where}.{field.name}"
        if field.name in document:
            values[field.name] = _value(str(field.type), document[field.name], name)
        else:
            has_default = field.default is not dataclasses.MISSING
            require(has_default, name, None, "given")
    return kind(**values)


def _value(kind: str, entry: object, name: str) -> object:
    if kind == "StepTimings":
        return _record(StepTimings, entry, name)
    if kind in _NUMBERS:
        whole = kind == "int"
        number = isinstance(entry, int if whole else (int, float)) and not isinstance(entry, bool)
        if not number or not 0 <= entry <= MAX_NUMBER:  # type: ignore[operator]
            raise InvalidInput.of(name, entry, f"a {'whole ' if whole else ''}number in [0, {MAX_NUMBER}]")
        return _NUMBERS[kind](entry)
    types: Mapping[str, type] = {"bool": bool, "str": str}
    require(isinstance(entry, types[kind]), name, entry, f"a {kind}")
    return entry
