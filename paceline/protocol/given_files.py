"""Files and JSON that users give, read in one way: an error names what was given, and the limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.protocol.errors import InvalidInput, require


def read_text(field: str, file: Path) -> str:
    """A file's text; raises `InvalidInput` where it can't be read, or is no UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput.of(field, str(file), f"a readable UTF-8 file ({error})") from error


def json_value(field: str, text: str) -> Any:
    """The value of a JSON text.

    Raises:
        InvalidInput: the text is no JSON, is nested deeper than the interpreter's stack, or has a number of more than
            4,300 digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput.of(field, text, f"JSON ({error})") from error


def read_json(field: str, file: Path) -> dict[str, Any]:
    """The JSON object that a file holds; raises `InvalidInput` where it holds something else."""
    value = json_value(f"{field} {file}", read_text(field, file))
    require(isinstance(value, dict), field, str(file), "a file with a JSON object")
    return dict(value)


def read_json_lines(field: str, file: Path) -> Iterator[tuple[str, Any]]:
    """The JSON values of a file's lines that are not empty, each with the name of its line for errors.

    Raises:
        InvalidInput: naming the file or the line.
    """
    # JSON's strings may hold what `splitlines` takes for a line's end.
    for number, line in enumerate(read_text(field, file).split("\n"), 1):
        if line.strip():
            where = f"{file} line {number}"
            yield where, json_value(where, line)
