"""One benchmark on two checkouts in turns: what a change did to its figures, beside a run against itself.

    python -m tools.in_turns --before ../base --figure 'ratio.median' -- speed --drafter auto --pairs 3

Each turn runs `paceline bench …` from one tree, before, after, after, before. Of the reports' JSON it compares
the numbers whose path matches `--figure`. The noise is the largest quotient of two runs of the same tree.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

_RUN = """
try:
    from paceline.cli.main import main
except ImportError:
    from paceline.cli import main
main()
"""


def numbers(value: Any, path: str = "", label: str = "") -> Iterator[tuple[str, str, float]]:
    """Every number of a JSON value: its path by places in lists, the same with what names its rows, and itself."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}", f"{label}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for place, inner in enumerate(value):
            yield from numbers(inner, f"{path}[{place}]", f"{label}[{_name_of(inner) or place}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, label, float(value)


def _name_of(row: Any) -> str:
    """What tells a report's rows apart: their texts and settings."""
    if not isinstance(row, Mapping):
        return ""
    settings = ("temperature", "verify_ms", "draft_ms", "acceptance", "sessions")
    return " ".join(str(value)[:24] for key, value in row.items() if isinstance(value, str) or key in settings)


def run(tree: Path, arguments: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Run a benchmark from a tree; returns its report's numbers with their labels, by path."""
    with tempfile.TemporaryDirectory() as out:
        environment = dict(os.environ) | {"PYTHONPATH": str(tree)}
        command = [sys.executable, "-c", _RUN, "bench", *arguments, "--out", out]
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        (report,) = Path(out).glob("*.json")
        return {path: (label, value) for path, label, value in numbers(json.loads(report.read_text()))}


Numbers = Mapping[str, tuple[str, float]]


def table(before: Sequence[Numbers], after: Sequence[Numbers], figure: str) -> str:
    """Markdown: each figure's medians, their quotient, and the noise."""
    lines = ["| figure | before | after | after ÷ before | noise |", "| --- | --- | --- | --- | --- |"]
    for path, (label, _) in after[0].items():
        old, new = ([run[path][1] for run in runs if path in run] for runs in (before, after))
        if re.search(figure, path) and old and min(*old, *new) > 0:
            noise = max(max(runs) / min(runs) for runs in (old, new))
            quotient = median(new) / median(old)
            lines.append(f"| {label} | {median(old):.3f} | {median(new):.3f} | {quotient:.3f} | {noise:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="The other checkout.")
    parser.add_argument("--turns", type=int, default=4, help="Runs of each tree; two understate the noise.")
    parser.add_argument("--figure", default=".", help="Regular expression on the paths of numbers.")
    parser.add_argument("benchmark", nargs="+", help="What follows `paceline bench`.")
    given = parser.parse_args()
    trees = {"before": given.before.resolve(), "after": Path.cwd()}
    found: dict[str, list[dict[str, tuple[str, float]]]] = {"before": [], "after": []}
    for turn in range(given.turns):
        for name in ("before", "after") if turn % 2 == 0 else ("after", "before"):
            found[name].append(run(trees[name], given.benchmark))
            sys.stderr.write(f"turn {turn + 1}: {name}\n")
    sys.stdout.write(table(found["before"], found["after"], given.figure))


if __name__ == "__main__":
    main()
