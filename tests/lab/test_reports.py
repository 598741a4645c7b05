"""What is read back from a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.protocol.errors import InvalidInput
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import earlier_turns, write_report

ASKED = {"model": "m", "settings": "a, b"}


def test_a_report_is_added_to_by_who_asks_for_the_same(tmp_path: Path) -> None:
    assert earlier_turns(tmp_path, "edits", ASKED) == []
    write_report(tmp_path, "edits", ASKED | {"load average": "0.1"}, {"turns": [{"task": "one"}]}, "# Edits\n")
    assert earlier_turns(tmp_path, "edits", ASKED) == [{"task": "one"}]
    for fact, found in (("settings", "'a, b'"), ("drafters", "None")):
        with pytest.raises(InvalidInput, match=rf"{fact} in .*edits-.*json = {found}: must be 'c', as now"):
            earlier_turns(tmp_path, "edits", ASKED | {fact: "c"})


def test_tables_have_a_line_for_each_row() -> None:
    assert markdown_table([{"a": 1, "b": 0.25}]) == "| a | b |\n| --- | --- |\n| 1 | 0.250 |\n"
    assert markdown_table([]) == "not run\n"
