"""Cases of the grid in which the planner is known to miss a bar, and by how much: a run of all is held to that.

`python -m paceline_lab.simulate.grid --record FILE` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

SLACK = 0.005
"""What a figure may fall by unnoticed: less than a token of a text of 128, whose draws another library may turn."""


@dataclass(frozen=True)
class Miss:
    """Where a bar is missed: the slowest request's speed over target-only's, and goodput over the best constant's."""

    worst_request: float
    goodput: float

    def is_no_worse_than(self, before: Miss) -> bool:
        """Whether neither figure has fallen."""
        return max(before.worst_request - self.worst_request, before.goodput - self.goodput) <= SLACK


def read_misses(file: Path) -> dict[str, Miss]:
    """The record, by the case's name."""
    return {case: Miss(**figures) for case, figures in json.loads(file.read_text()).items()}


def renew_misses(file: Path, ran: Mapping[str, Miss | None]) -> None:
    """Replace what the record says of the cases that ran, None: both bars are met. The others stay."""
    before = read_misses(file) if file.exists() else {}
    misses = {case: miss for case, miss in {**before, **ran}.items() if miss is not None}
    lines = [f" {json.dumps(case)}: {json.dumps(asdict(miss))}" for case, miss in sorted(misses.items())]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
