"""One event is one line, whatever is in it."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from paceline.runtime import process
from paceline.runtime.logs import MAX_LINE_CHARACTERS, JsonLine, OneLine, one_line, speak_of
from paceline.runtime.process import find_refusal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ‘quoted’ — ünïcode 東京", "plain text, ‘quoted’ — ünïcode 東京"),
        ("a\x1b[31mb\x07", r"a\x1b[31mb\x07"),
        ("a\x85b\u2028c\u202ed", r"a\x85b\u2028c\u202ed"),
        ("\ud800", r"\ud800"),
        ("\U000e0001", r"\U000e0001"),
        (r"a\nb", r"a\nb"),
    ],
)
def test_what_is_not_printable_is_escaped(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_what_is_long_is_cut_and_says_so() -> None:
    assert one_line("x" * 10, limit=10) == "x" * 10
    assert one_line("x" * 15, limit=10) == "xxxxxxxxxx… (5 more characters)"


def record_of(message: str, *arguments: object, error: Exception | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    return logging.LogRecord("paceline.test", logging.WARNING, __file__, 1, message, arguments, info)


def test_arguments_of_a_record_are_made_harmless_with_it() -> None:
    record = record_of("link up: incarnation=%s", "x\n2026-01-01 ERROR forged" + "y" * 2 * MAX_LINE_CHARACTERS)
    line = OneLine("rank 1: ").format(record)
    assert "\n" not in line
    assert r" WARNING paceline.test rank 1: link up: incarnation=x\n2026-01-01 ERROR forged" in line
    assert len(line) < MAX_LINE_CHARACTERS + 200


def test_no_line_of_a_stack_can_pass_for_an_event() -> None:
    record = record_of("call failed", error=ValueError("x\n2026-01-01 ERROR forged\x1b[2J"))
    first, *stack = OneLine().format(record).split("\n")
    assert first.endswith("call failed")
    assert len(stack) >= 2
    assert all(line.startswith("    ") and line.isprintable() for line in stack)


def test_services_log_through_it_and_a_caller_that_leaves_behind_its_text_is_no_error() -> None:
    code = (
        "import logging; from paceline.runtime.logs import log_to_stderr; log_to_stderr(); logging.info('a\\nb')\n"
        "log = logging.getLogger('grpc._cython.cygrpc')\n"
        "log.error('ExecuteBatchError raised in core by servicer method [%s]', '/m'); log.error('another')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.rsplit(" ", 1)[-1] for line in done.stderr.splitlines()] == [r"a\nb", "another"]


def as_json(message: str, *arguments: object, error: Exception | None = None) -> dict[str, Any]:
    line = JsonLine("rank 1: ").format(record_of(message, *arguments, error=error))
    assert line.isprintable()
    assert line.isascii()
    fields: dict[str, Any] = json.loads(line)
    return fields


def test_a_messages_facts_are_fields_of_json() -> None:
    fields = as_json("100%% done: session=%d reason=%s after %g of seconds=%.1f", 7, "length", 2.0, 0.25)
    assert fields["message"] == "100% done: session=7 reason=length after 2 of seconds=0.2"
    assert (fields["level"], fields["logger"], fields["speaker"]) == ("WARNING", "paceline.test", "rank 1")
    assert (fields["session"], fields["reason"], fields["seconds"]) == (7, "length", 0.25)
    assert fields.keys() == {"time", "level", "logger", "speaker", "message", "session", "reason", "seconds"}


def test_json_is_harmless_whatever_is_in_it() -> None:
    hostile = 'x\n{"level": "ERROR"}\x1b[2J\u2028' + "y" * 2 * MAX_LINE_CHARACTERS
    fields = as_json("link up: incarnation=%s", hostile, error=ValueError(hostile))
    assert fields["level"] == "WARNING"
    assert r"x\n{" in fields["incarnation"]
    assert all(len(line) < MAX_LINE_CHARACTERS + 200 and line.isprintable() for line in fields["stack"])


def test_a_fact_takes_no_fields_place() -> None:
    assert as_json("forged: level=%s time=%s", "ERROR", "never")["level"] == "WARNING"


@pytest.mark.parametrize("formatter", [OneLine(), JsonLine()], ids=["console", "json"])
async def test_what_is_logged_for_a_request_says_so(formatter: logging.Formatter) -> None:
    record = record_of("late: session=%d", 3)

    async def log() -> str:
        return formatter.format(record)

    with speak_of(request="r\n1", trace=""):
        within = await asyncio.create_task(log())
    assert r"r\n1" in within.replace("\\\\", "\\")
    assert "trace" not in within
    assert "r" + r"\n1" not in formatter.format(record)


def test_a_refusal_is_found_in_either_format() -> None:
    record = logging.LogRecord(
        process.__name__, logging.ERROR, __file__, 1, "%s refused: %s", ("target service", "no"), None
    )
    for formatter in (OneLine(), JsonLine()):
        assert find_refusal(["", formatter.format(record)]) == "target service refused: no"
    assert find_refusal(['{"message": "x"}', "{", "[1]"]) is None
