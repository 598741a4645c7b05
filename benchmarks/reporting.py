"""Reports: one JSON and one Markdown file of a benchmark, with what the machine and the command were."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import as_markdown, describe

RESAMPLES = 10_000


def median_with_lower_bound(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Median, and the lower end of its 95 % bootstrap interval (one-sided)."""
    sample = np.asarray(values, np.float64)
    drawn = np.random.default_rng(seed).integers(sample.size, size=(RESAMPLES, sample.size))
    return float(np.median(sample)), float(np.quantile(np.median(sample[drawn], axis=1), 0.05))


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A table with the first row's keys as titles; floats get three decimals."""
    if not rows:
        return "not run\n"
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def verdict(value: float, bar: float) -> str:
    """`met` or `missed` with the bar."""
    return f"{'met' if value >= bar else 'missed'} (bar {bar:.3g})"


def write_report(out: Path, name: str, settings: dict[str, str], results: Sequence[Any], tables: str) -> str:
    """Write `NAME-DATE.json` and `.md` into a folder; returns the Markdown.

    `results` are dataclasses; `tables` is Markdown that follows title, facts and settings.
    """
    facts = describe() | settings
    text = f"# {name.replace('-', ' ').capitalize()}\n\n{as_markdown(facts)}\n{tables}"
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{name}-{datetime.date.today().isoformat()}"
    data = {"facts": facts, "results": [dataclasses.asdict(result) for result in results]}
    stem.with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n")
    stem.with_suffix(".md").write_text(text)
    return text


def _cell(cell: object) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)
