"""Runs the whole test matrix and writes `docs/reports/test-full-DATE.md`.

python -m tools.full_report [PYTEST ARGUMENTS]
"""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from paceline_lab import REPORTS
from paceline_lab.reporting.reports import as_markdown, describe


@dataclass
class Module:
    """Outcomes and time of the tests of one module."""

    passed_count: int = 0
    failed_count: int = 0
    skipped_count: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def read_results(junit: Path) -> dict[str, Module]:
    """Fold pytest's JUnit file by test module."""
    modules: defaultdict[str, Module] = defaultdict(Module)
    # The file is our own pytest's, written a moment ago.
    for case in ElementTree.parse(junit).iter("testcase"):  # noqa: S314
        module = modules[case.get("classname", "?")]
        module.seconds += float(case.get("time", "0"))
        if case.find("failure") is not None or case.find("error") is not None:
            module.failed_count += 1
            module.failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            module.skipped_count += 1
        else:
            module.passed_count += 1
    return dict(sorted(modules.items()))


def report(modules: dict[str, Module], facts: dict[str, str]) -> str:
    """The report's Markdown."""
    passed_count = sum(module.passed_count for module in modules.values())
    failed_count = sum(module.failed_count for module in modules.values())
    skipped_count = sum(module.skipped_count for module in modules.values())
    lines = [f"# `make test-full`, {datetime.date.today().isoformat()}", "", as_markdown(facts)]
    lines += [f"**{passed_count} passed, {failed_count} failed, {skipped_count} skipped.**", ""]
    lines += ["| module | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    for name, module in modules.items():
        counts = f"{module.passed_count} | {module.failed_count} | {module.skipped_count}"
        lines.append(f"| {name} | {counts} | {module.seconds:.1f} |")
    failures = [name for module in modules.values() for name in module.failures]
    if failures:
        lines += ["", "Failed:", "", *(f"- `{name}`" for name in failures)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run pytest, write the report, return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", *sys.argv[1:]]
        code = subprocess.run(command, check=False).returncode
        modules = read_results(junit)
    REPORTS.mkdir(parents=True, exist_ok=True)
    file = REPORTS / f"test-full-{datetime.date.today().isoformat()}.md"
    file.write_text(report(modules, describe()))
    sys.stdout.write(f"report: {file}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
