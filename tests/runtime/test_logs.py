"""One event is one line, whatever is in it."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from paceline.runtime.logs import MAX_LINE_CHARACTERS, OneLine, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ‘quoted’ — ünïcode 東京", "plain text, ‘quoted’ — ünïcode 東京"),
        ("a\r\nb", r"a\r\nb"),
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


def formatted(message: str, *arguments: object, error: Exception | None = None) -> list[str]:
    info = (type(error), error, None) if error else None
    record = logging.LogRecord("paceline.test", logging.WARNING, __file__, 1, message, arguments, info)
    return OneLine("rank 1: ").format(record).split("\n")


def test_arguments_of_a_record_are_made_harmless_with_it() -> None:
    (line,) = formatted("link up: incarnation=%s", "x\n2026-01-01 ERROR forged" + "y" * 2 * MAX_LINE_CHARACTERS)
    assert r" WARNING paceline.test rank 1: link up: incarnation=x\n2026-01-01 ERROR forged" in line
    assert len(line) < MAX_LINE_CHARACTERS + 200


def test_no_line_of_a_stack_can_pass_for_an_event() -> None:
    first, *stack = formatted("call failed", error=ValueError("x\n2026-01-01 ERROR forged\x1b[2J"))
    assert first.endswith("call failed")
    assert len(stack) >= 2
    assert all(line.startswith("    ") and line.isprintable() for line in stack)


def test_services_log_through_it() -> None:
    code = "import logging; from paceline.runtime.logs import log_to_stderr; log_to_stderr(); logging.info('a\\nb')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.endswith(" INFO root a\\nb\n")
