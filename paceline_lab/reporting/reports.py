"""Reports: NAME-DATE.json, NAME-DATE.md and their plots in one folder, with the machine and software behind them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.protocol.errors import require
from paceline.runtime.process import processor_name
from paceline_lab.reporting.presentation import Plot, draw

PACKAGES = ("torch", "transformers", "grpcio", "numpy", "numba")


def describe() -> dict[str, str]:
    """Return command, commit, hardware and versions, each in words; the user's home folder is written `~`."""
    facts = {
        "command": " ".join([*_program(), *sys.argv[1:]]).replace(str(Path.home()), "~"),
        "commit": _commit(),
        "machine": f"{processor_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    facts |= {package: importlib.metadata.version(package) for package in PACKAGES}
    return facts


def as_markdown(facts: Mapping[str, str]) -> str:
    """Write a bullet for each fact."""
    return "".join(f"- {name}: {value}\n" for name, value in facts.items())


def load_average() -> str:
    """Return the mean number of running processes in the last minute; other work on the machine shows here."""
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


def report_file(folder: Path, name: str, suffix: str) -> Path:
    """Return the path of today's file of a report."""
    return folder / f"{_dated_name(name)}.{suffix}"


def earlier_turns(folder: Path, name: str, facts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the turns of today's report, to add to them; none where there is no report.

    Raises:
        InvalidInput: the report's facts differ from these.
    """
    report = report_file(folder, name, "json")
    if not report.exists():
        return []
    values = json.loads(report.read_text())
    for fact, value in facts.items():
        report_value = values["facts"].get(fact)
        require(report_value == value, f"{fact} in {report}", report_value, f"{value!r}, as now, to be added to")
    turns: list[dict[str, Any]] = values["turns"]
    return turns


def write_report(
    folder: Path,
    name: str,
    facts: Mapping[str, str],
    values: Mapping[str, Any],
    text: str,
    plots: Sequence[Plot] = (),
) -> Path:
    """Write a report in place of that of the same name and day; return the Markdown's path.

    Args:
        folder: folder of the files; made if it isn't there.
        name: name of the report, whose files are NAME-DATE.
        facts: `describe()` and the settings; they stand under the title and in the JSON.
        values: other contents of the JSON.
        text: Markdown, whose first line is the title.
        plots: plots below the text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = {"facts": dict(facts)} | dict(values)
    report_file(folder, name, "json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    title, _, body = text.partition("\n")
    markdown = f"{title}\n\n{as_markdown(facts)}{body}"
    for number, plot in enumerate(plots, 1):
        file = folder / f"{_dated_name(name)}-{number}.svg"
        draw(plot, file)
        markdown += f"\n![{plot.title}]({file.name})\n"
    markdown_file = report_file(folder, name, "md")
    markdown_file.write_text(markdown)
    return markdown_file


def write_rows(out: Path, name: str, settings: Mapping[str, str], rows: Sequence[Any], tables: str) -> str:
    """Write the report of a program whose results are dataclasses, under its name; return the Markdown."""
    values = {"results": [asdict(row) for row in rows]}
    title = f"# {name.replace('-', ' ').capitalize()}\n"
    return write_report(out, name, describe() | dict(settings), values, f"{title}\n{tables}").read_text()


def _dated_name(name: str) -> str:
    return f"{name}-{datetime.date.today().isoformat()}"


def _program() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["python", "-m", spec.name] if spec else [Path(sys.argv[0]).name]


def _commit() -> str:
    """Return the commit; `-dirty` if a tracked file differs from it, other than reports, which don't run."""
    try:
        commit = _git("describe", "--always")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)docs/reports")
    except OSError:
        return "unknown"
    return (commit and commit + ("-dirty" if changes else "")) or "unknown"


def _git(*command: str) -> str:
    arguments = ["git", *command]
    process = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return process.stdout.strip()
