"""`python -m tests.fuzz.report`: what the kept runs found, as `docs/reports/fuzz-DATE.md`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline_lab import REPORTS
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, write_report
from tests.fuzz.__main__ import BUILD
from tests.fuzz.cases import ACCEPTED, SurfaceTally, kept_tallies
from tests.fuzz.surfaces import CASES

LIBRARIES = ("protobuf", "hypothesis", "llguidance", "fastapi", "pydantic")
KINDS_SHOWN = 8


def by_surface(tallies: Sequence[SurfaceTally]) -> list[SurfaceTally]:
    """The pieces of each surface as one, in the order of the surfaces."""
    surfaces: dict[str, SurfaceTally] = {}
    for tally in sorted(tallies, key=lambda each: (each.surface, each.seed, each.first)):
        before = surfaces.get(tally.surface)
        if before is None:
            surfaces[tally.surface] = tally
            continue
        surfaces[tally.surface] = replace(
            before,
            cases=before.cases + tally.cases,
            seconds=before.seconds + tally.seconds,
            slowest_ms=max(before.slowest_ms, tally.slowest_ms),
            kinds=before.kinds + tally.kinds,
            findings=[*before.findings, *tally.findings],
            facts=before.facts | tally.facts,
        )
    return [surfaces[name] for name in CASES if name in surfaces]


def text(surfaces: Sequence[SurfaceTally]) -> str:
    total, untyped = sum(each.cases for each in surfaces), sum(len(each.findings) for each in surfaces)
    rows = [
        {
            "surface": each.surface,
            "cases": each.cases,
            "accepted": each.kinds[ACCEPTED],
            "typed errors": sum(each.kinds.values()) - each.kinds[ACCEPTED],
            "untyped": len(each.findings),
            "seconds": round(each.seconds, 1),
            "slowest ms": round(each.slowest_ms, 1),
        }
        for each in surfaces
    ]
    kinds = sum((each.kinds for each in surfaces), Counter[str]())
    lines = [f"# Fuzz\n\n{total} cases, untyped: {untyped}.\n", markdown_table(rows), "## Kinds of answers\n"]
    lines += [f"- {each.surface}: {_kinds(each.kinds)}" for each in surfaces]
    lines += [f"- all: {_kinds(kinds, len(kinds))}\n", "## Facts\n"]
    lines += [f"- {each.surface}: {name}: {value}" for each in surfaces for name, value in each.facts.items()]
    lines += ["\n## Untyped\n", *(_found(surfaces) or ["None."])]
    return "\n".join(lines) + "\n"


def _kinds(kinds: Counter[str], most: int = KINDS_SHOWN) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(most))


def _found(surfaces: Sequence[SurfaceTally]) -> list[str]:
    return [f"- {finding.what} (`{finding.case.replay}`)" for each in surfaces for finding in each.findings]


def _values(surfaces: Sequence[SurfaceTally]) -> list[dict[str, Any]]:
    return [
        {
            "surface": each.surface,
            "cases": each.cases,
            "seconds": each.seconds,
            "kinds": dict(each.kinds),
            "facts": each.facts,
            "untyped": [finding.what for finding in each.findings],
        }
        for each in surfaces
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", type=Path, default=BUILD, help="Where results are kept.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    arguments = parser.parse_args()
    tallies = kept_tallies(arguments.kept)
    surfaces = by_surface(tallies)
    seeds = ", ".join(str(seed) for seed in sorted({each.seed for each in tallies}))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES)
    facts = describe() | {"seeds": seeds, "libraries": versions, "runs": "python -m tests.fuzz, in pieces"}
    written = write_report(arguments.out, "fuzz", facts, {"results": _values(surfaces)}, text(surfaces))
    sys.stdout.write(written.read_text())
    return int(any(each.findings for each in surfaces))


if __name__ == "__main__":
    sys.exit(main())
