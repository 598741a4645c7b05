"""Where reports go: NAME-DATE.json and NAME-DATE.md in one folder, and their plots beside them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting.plots import Plot, can_plot, draw


def report_file(folder: Path, name: str, suffix: str) -> Path:
    """Today's file of a report."""
    return folder / f"{_dated(name)}.{suffix}"


def write_report(folder: Path, name: str, values: Any, markdown: str, plots: Sequence[Plot] = ()) -> Path:
    """Write the report, replacing that of the same name and day; returns the Markdown's path.

    Plots are left out where matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report_file(folder, name, "json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    if can_plot():
        for number, plot in enumerate(plots, 1):
            files = draw(plot, folder / f"{_dated(name)}-{number}")
            markdown += f"\n![{plot.title}]({files[-1].name})\n"
    written = report_file(folder, name, "md")
    written.write_text(markdown)
    return written


def _dated(name: str) -> str:
    return f"{name}-{datetime.date.today().isoformat()}"
