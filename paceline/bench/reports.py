"""Where reports go: NAME-DATE.json and NAME-DATE.md in one folder, and their plots beside them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.plots import Plot, can_plot, draw


def write_report(folder: Path, name: str, values: Any, markdown: str, plots: Sequence[Plot] = ()) -> Path:
    """Write the report, replacing that of the same name and day; returns the Markdown's path.

    Plots are left out where matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{datetime.date.today().isoformat()}"
    (folder / f"{stem}.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    if can_plot():
        for number, plot in enumerate(plots, 1):
            files = draw(plot, folder / f"{stem}-{number}")
            markdown += f"\n![{plot.title}]({files[-1].name})\n"
    written = folder / f"{stem}.md"
    written.write_text(markdown)
    return written
