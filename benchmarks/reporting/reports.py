"""Reports: one JSON and one Markdown file of a benchmark, with what the machine and the command were."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting import files as reports
from benchmarks.reporting.environment import as_markdown, describe
from benchmarks.reporting.tables import markdown_table, median_with_lower_bound, verdict


def write_report(out: Path, name: str, settings: dict[str, str], results: Sequence[Any], tables: str) -> str:
    """Write `NAME-DATE.json` and `.md` into a folder; returns the Markdown.

    `results` are dataclasses; `tables` is Markdown that follows title, facts and settings.
    """
    facts = describe() | settings
    text = f"# {name.replace('-', ' ').capitalize()}\n\n{as_markdown(facts)}\n{tables}"
    data = {"facts": facts, "results": [dataclasses.asdict(result) for result in results]}
    reports.write_report(out, name, data, text)
    return text


__all__ = ["markdown_table", "median_with_lower_bound", "verdict", "write_report"]
