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
    """Command, commit, hardware and versions, each in words; the user's home folder is written `~`."""
    facts = {
        "command": " ".join([*_program(), *sys.argv[1:]]).replace(str(Path.home()), "~"),
        "commit": _commit(),
        "machine": f"{processor_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    facts |= {package: importlib.metadata.version(package) for package in PACKAGES}
    return facts


def as_markdown(facts: Mapping[str, str]) -> str:
    """One bullet a fact."""
    return "".join(f"- {name}: {value}\n" for name, value in facts.items())


def load_average() -> str:
    """Running processes over the last minute; other work on the machine shows here."""
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


def report_file(folder: Path, name: str, suffix: str) -> Path:
    """Today's file of a report."""
    return folder / f"{_dated(name)}.{suffix}"


def earlier_turns(folder: Path, name: str, asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """The turns of today's report, to be added to; none where there is no report.

    Raises:
        InvalidInput: it was asked for something else, by its facts.
    """
    report = report_file(folder, name, "json")
    if not report.exists():
        return []
    values = json.loads(report.read_text())
    for fact, value in asked.items():
        found = values["facts"].get(fact)
        require(found == value, f"{fact} in {report}", found, f"{value!r}, as now, to be added to")
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
    """Write a report, replacing that of the same name and day; returns the Markdown's path.

    Args:
        folder: made if it isn't there.
        name: the files are NAME-DATE.
        facts: `describe()` and the settings; they stand under the title and in the JSON.
        values: what else the JSON holds.
        text: Markdown, whose first line is the title.
        plots: shown below the text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = {"facts": dict(facts)} | dict(values)
    report_file(folder, name, "json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    title, _, body = text.partition("\n")
    markdown = f"{title}\n\n{as_markdown(facts)}{body}"
    for number, plot in enumerate(plots, 1):
        file = folder / f"{_dated(name)}-{number}.svg"
        draw(plot, file)
        markdown += f"\n![{plot.title}]({file.name})\n"
    written = report_file(folder, name, "md")
    written.write_text(markdown)
    return written


def write_rows(out: Path, name: str, settings: Mapping[str, str], rows: Sequence[Any], tables: str) -> str:
    """Write the report of a program whose results are dataclasses, under its name; returns the Markdown."""
    values = {"results": [asdict(row) for row in rows]}
    title = f"# {name.replace('-', ' ').capitalize()}\n"
    return write_report(out, name, describe() | dict(settings), values, f"{title}\n{tables}").read_text()


def _dated(name: str) -> str:
    return f"{name}-{datetime.date.today().isoformat()}"


def _program() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["python", "-m", spec.name] if spec else [Path(sys.argv[0]).name]


def _commit() -> str:
    """The commit; `-dirty` if a tracked file differs from it that is no report: those change nothing that runs."""
    try:
        commit = _git("describe", "--always")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)docs/reports")
    except OSError:
        return "unknown"
    return (commit and commit + ("-dirty" if changed else "")) or "unknown"


def _git(*command: str) -> str:
    asked = ["git", *command]
    found = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found.stdout.strip()
