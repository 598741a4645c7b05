"""Tables of the timed benchmarks' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.reporting.figures import Spread, lower_bound


def median_with_lower_bound(values: Sequence[float]) -> tuple[float, float]:
    """Median, and its one-sided 95 % lower bound by bootstrap."""
    return Spread.of(values).median, lower_bound(values)


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A table with the first row's keys as titles; floats get three decimals."""
    if not rows:
        return "not run\n"
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def verdict(value: float, bar: float) -> str:
    """`met` or `missed` with the bar."""
    return f"{'met' if value >= bar else 'missed'} (bar {bar:.3g})"


def _cell(cell: object) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)
