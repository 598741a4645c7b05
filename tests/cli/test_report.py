"""The dated report of `make test-full`."""

from __future__ import annotations

from pathlib import Path

from tools.full_report import read_results, report

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one" time="1.5"/>
<testcase classname="tests.a" name="two" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.b" name="three" time="0.0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_report_counts_by_module_and_names_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    file.write_text(JUNIT)
    text = report(read_results(file), {"machine": "two cores"})
    assert "**1 passed, 1 failed, 1 skipped.**" in text
    assert "| tests.a | 1 | 1 | 0 | 2.0 |" in text
    assert "| tests.b | 0 | 0 | 1 | 0.0 |" in text
    assert "- `tests.a::two`" in text
    assert "- machine: two cores" in text
