"""What became of a surface's cases, kept between runs: 100,000 cases are tried in pieces."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.fuzz.cases import FuzzCase, FuzzFinding, SurfaceTally


def keep_tally(folder: Path, tally: SurfaceTally) -> None:
    """Write a surface's results, in place of those of the same seed and first case."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{tally.surface}-{tally.seed}-{tally.first}.json"
    # `asdict` makes another Counter of a Counter.
    plain = asdict(replace(tally, kinds=Counter())) | {"kinds": dict(tally.kinds)}
    file.write_text(json.dumps(plain, indent=1) + "\n")


def kept_tallies(folder: Path) -> list[SurfaceTally]:
    return [_tally(json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]


def _tally(value: dict[str, Any]) -> SurfaceTally:
    findings = [FuzzFinding(FuzzCase(**each["case"]), each["what"]) for each in value["findings"]]
    return SurfaceTally(**{**value, "kinds": Counter(value["kinds"]), "findings": findings})
