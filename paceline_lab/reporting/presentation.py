"""Figures as Markdown tables, and as grouped bars in SVG (matplotlib, of `paceline[bench]`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline_lab.reporting.figures import Spread

_GROUP_WIDTH = 0.8
_SPECIAL = re.compile(r"[\\`*_{}\[\]()<>|#~$&!+.-]")
"""What Markdown may read as more than itself."""


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Write a table with the first row's keys as titles; floats get three decimals."""
    if not rows:
        return "not run\n"
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(_markdown_cell(cell) for cell in line)} |\n" for line in lines)


def titled_row(row: Any, **more: object) -> dict[str, object]:
    """Return a table's row from a dataclass: its fields by name, then more columns, or others in their place."""
    return {name.replace("_", " "): value for name, value in (asdict(row) | more).items()}


class ModelText(str):
    """Text of a model's: a cell shows it in quotes, and escapes characters that can't be seen."""

    __slots__ = ()


def cell_text(cell: object) -> str:
    """Write a table's cell."""
    if isinstance(cell, ModelText):
        return json.dumps(str(cell), ensure_ascii=False)
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _markdown_cell(cell: object) -> str:
    """Write a cell of a Markdown table, which escapes what Markdown would read in a model's text."""
    text = cell_text(cell)
    return _SPECIAL.sub(r"\\\g<0>", text) if isinstance(cell, ModelText) else text


def spread_text(spread: Spread, digits: int = 1) -> str:
    """Write median (min to max)."""
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def failures_text(title: str, failures: Mapping[str, str]) -> str:
    """Write a line for each failure, with its reason; nothing without failures."""
    lines = "".join(f"- {name}: {' '.join(why.split())}\n" for name, why in failures.items())
    return f"{title}\n\n{lines}" if lines else ""


@dataclass(frozen=True)
class Bars:
    """One colour of a plot: a value for each group, with its extremes; None leaves a gap.

    Attributes:
        marks: a line across each bar, such as a ceiling; empty: none.
    """

    label: str
    values: Sequence[Spread | None]
    marks: Sequence[float | None] = ()


@dataclass(frozen=True)
class Plot:
    """Grouped bars; `line` is drawn across, such as target-only's 1."""

    title: str
    unit: str
    groups: Sequence[str]
    bars: Sequence[Bars]
    line: float | None = None


def draw(plot: Plot, file: Path) -> None:
    """Write an SVG, the same for the same figures."""
    matplotlib: Any = import_module("matplotlib")
    figures: Any = import_module("matplotlib.figure")
    width = max(6.0, 0.3 * len(plot.groups) * max(1, len(plot.bars)) + 2)
    with matplotlib.rc_context({"svg.hashsalt": plot.title, "font.size": 9}):
        figure = figures.Figure(figsize=(width, 4.2), layout="constrained")
        axes = figure.subplots()
        _draw_bars(axes, plot)
        axes.set_title(plot.title)
        axes.set_ylabel(plot.unit)
        axes.set_xticks(range(len(plot.groups)), plot.groups)
        lows = [each.low for bars in plot.bars for each in bars.values if each is not None]
        axes.set_ylim(bottom=1.05 * min([0.0, *lows]))
        axes.legend(loc="upper left", fontsize=8)
        figure.savefig(file, metadata={"Date": None})


def _draw_bars(axes: Any, plot: Plot) -> None:
    step = _GROUP_WIDTH / max(1, len(plot.bars))
    if plot.line is not None:
        axes.axhline(plot.line, color="black", linewidth=0.8)
    for number, bars in enumerate(plot.bars):
        shift = (number + 0.5) * step - _GROUP_WIDTH / 2
        spreads = [(place + shift, value) for place, value in enumerate(bars.values) if value is not None]
        heights = [value.median for _, value in spreads]
        below = [value.median - value.low for _, value in spreads]
        above = [value.high - value.median for _, value in spreads]
        places = [place for place, _ in spreads]
        axes.bar(places, heights, step * 0.9, yerr=(below, above), capsize=2, label=bars.label, error_kw={"lw": 0.8})
        for place, mark in enumerate(bars.marks):
            if mark:
                left_end = place + shift - step * 0.45
                axes.hlines(mark, left_end, left_end + step * 0.9, colors="black", linestyles="dashed", linewidth=0.8)
