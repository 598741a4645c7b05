"""What the obedient model writes, and how a framework's lines are judged."""

from __future__ import annotations

import json

import pytest

from tests.compat.frameworks import ASKED, FOLDER, FRAMEWORKS, WANTED, check
from tests.compat.obedient import UNASKED, reply

ASKS = f"<s>system\nBe «odd».</s>\n<s>user\n{ASKED['schema and tool']}</s>\n"
CALLS = f"<s>assistant\n{ASKED['said']}</s>\n<s>user\n<tool_response>\n42\n</tool_response></s>\n"


def test_it_writes_one_quote_a_turn_and_the_result_in_the_next() -> None:
    assert reply("<s>user\nhello</s>\n<s>assistant\n") == UNASKED
    assert json.loads(reply(ASKS).splitlines()[1]) == {"name": "add", "arguments": {"a": 2, "b": 40}}
    assert reply(ASKS + CALLS) == '{"city": "Köln", "bridges": 42}'
    assert reply(f"{ASKS}{CALLS}<s>user\n{ASKED['text']}</s>\n") == ASKED["said"], "the latest counts"


def line(call: str, text: str) -> str:
    return json.dumps({"call": call, "text": text})


def test_what_a_framework_got_is_held_against_what_was_told() -> None:
    right = [line("text", WANTED["text"]), "a warning", line("responses tool, streamed", WANTED["tool"])]
    assert len(check("\n".join(right))) == 2
    for wrong in ([line("tool", "The sum is .")], [], [right[0], right[0]]):
        with pytest.raises(AssertionError):
            check("\n".join(wrong))


def test_every_script_is_somebodys() -> None:
    there = {file.name for file in FOLDER.iterdir() if file.is_file()} - {"asked.py"}
    assert there == {framework.script for framework in FRAMEWORKS}
