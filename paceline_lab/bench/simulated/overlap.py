"""What hiding drafting behind verification brings, on simulated models: `paceline bench overlap`.

Efficiency. A run's own round records are replayed at no cost of coordination (`paceline_lab.bench.simulated.replay`).
Efficiency is that ideal time over the time that the run took, from its first tokens to its last. Beside
it stands the floor of coordination, measured in the same run: an idle echo over gRPC (`echo` beside this module).
T_verify / (T_verify + echo) is what nothing can pass that sends every round over gRPC; self-started rounds, whose
proposal was prefetched, can.

Delay. Services at a distance (`paceline_lab.bench.simulated.remote`).

Every session is alone on its services, coupled, k = 4; temperature is 1 unless the table says otherwise.
The grids can run in parts: what a run adds to a report replaces its own cells, and all runs are listed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.protocol.errors import require
from paceline_lab.bench.simulated import remote
from paceline_lab.bench.simulated.distributions import DRAFT_OF_ACCEPTANCE
from paceline_lab.bench.simulated.echo import echo_ms, echo_server
from paceline_lab.bench.simulated.local import (
    EFFICIENCY_GRID,
    VERIFY_MS,
    Efficiency,
    efficiency_plot,
    efficiency_row,
    loss_row,
    measure_efficiency,
)
from paceline_lab.bench.simulated.remote import (
    Detour,
    Remote,
    measure_detours,
    measure_remotes,
    remote_plot,
    remote_rows,
)
from paceline_lab.bench.simulated.replay import FAN_OUT, K
from paceline_lab.bench.simulated.services import SimulatedPair
from paceline_lab.reporting.presentation import Plot, markdown_table
from paceline_lab.reporting.progress import Advance, measuring
from paceline_lab.reporting.reports import as_markdown, describe, load_average, report_file, write_report

GRIDS = ("efficiency", "delay")
LOSSES = "Where rounds lose, medians in milliseconds:\n"


@dataclass(frozen=True)
class OverlapPlan:
    """Parts of the grids.

    Raises:
        InvalidInput: a value that no grid has.
    """

    grids: Sequence[str] = GRIDS
    verify_ms: Sequence[float] = VERIFY_MS
    acceptances: Sequence[float] = tuple(DRAFT_OF_ACCEPTANCE)
    generations: int = 9
    tokens: int = 256

    def __post_init__(self) -> None:
        _require_known("only", self.grids, GRIDS)
        _require_known("verify_ms", self.verify_ms, VERIFY_MS)
        _require_known("acceptance", self.acceptances, tuple(DRAFT_OF_ACCEPTANCE))
        require(self.generations >= 1, "generations", self.generations, "at least 1")
        require(self.tokens >= 2, "tokens", self.tokens, "at least 2")

    @property
    def efficiencies(self) -> list[tuple[SimulatedPair, float]]:
        """Return pairs of the first grid with their bars."""
        pairs = [(pair, bar) for pair, bar in EFFICIENCY_GRID if pair.verify_ms in self.verify_ms]
        return pairs if "efficiency" in self.grids else []

    @property
    def distances(self) -> Sequence[float]:
        """Return every T_verify of the second grid."""
        return self.verify_ms if "delay" in self.grids else ()

    def __len__(self) -> int:
        """Return the number of cells to measure."""
        remotes = len(self.distances) * remote.cells(len(self.acceptances))
        return len(self.efficiencies) + remotes


def _require_known(field: str, values: Sequence[Any], choices: Sequence[Any]) -> None:
    require(bool(values), field, values, f"some of {choices}")
    for value in values:
        require(value in choices, field, value, f"one of {', '.join(str(one) for one in choices)}")


@dataclass(frozen=True)
class Results:
    """Rows of every table, and the facts of the runs that measured them."""

    runs: tuple[Mapping[str, str], ...] = ()
    efficiencies: tuple[Efficiency, ...] = ()
    remotes: tuple[Remote, ...] = ()
    detours: tuple[Detour, ...] = ()

    @classmethod
    def load(cls, file: Path) -> Results:
        """Read a report's JSON; return no rows if there is no such file."""
        if not file.exists():
            return cls()
        report = json.loads(file.read_text())
        return cls(
            runs=tuple(report["runs"]),
            efficiencies=tuple(Efficiency(**row) for row in report["efficiencies"]),
            remotes=tuple(Remote(**row) for row in report["remotes"]),
            detours=tuple(Detour(**row) for row in report["detours"]),
        )

    def merge(self, newer: Results) -> Results:
        """Add a newer run: its rows replace those of the same cells, and its facts those of the same command."""
        commands = {run["command"] for run in newer.runs}
        return Results(
            runs=(*(run for run in self.runs if run["command"] not in commands), *newer.runs),
            efficiencies=_merge_rows(self.efficiencies, newer.efficiencies),
            remotes=_merge_rows(self.remotes, newer.remotes),
            detours=_merge_rows(self.detours, newer.detours),
        )

    def markdown(self) -> str:
        """Write the report."""
        runs = "".join(f"\n{as_markdown(run)}" for run in self.runs)
        return (
            "# Overlap\n"
            f"\n## Coordination efficiency\n\n{markdown_table([efficiency_row(row) for row in self.efficiencies])}\n"
            f"{LOSSES}\n{markdown_table([loss_row(row) for row in self.efficiencies])}\n"
            f"## Services at a distance\n\n{remote.SETTINGS}\n{markdown_table(remote_rows(self.remotes))}\n"
            f"{remote.DETOURS}\n{markdown_table([asdict(row) for row in self.detours])}\n"
            f"## Runs\n{runs}"
        )

    def plots(self) -> list[Plot]:
        """Plot efficiency under its ceiling and, at a distance, overlap on over target-only."""
        plots = [efficiency_plot(self.efficiencies), remote_plot(self.remotes)]
        return [plot for plot in plots if plot.groups]


class _Cell(Protocol):
    @property
    def cell(self) -> tuple[Any, ...]: ...


Row = TypeVar("Row", bound=_Cell)


def _merge_rows(earlier: Sequence[Row], newer: Sequence[Row]) -> tuple[Row, ...]:
    rows = {row.cell: row for row in (*earlier, *newer)}
    return tuple(rows[cell] for cell in sorted(rows))


def measure_efficiencies(plan: OverlapPlan, folder: Path, advance: Advance) -> Iterator[Efficiency]:
    """Measure the first grid, each T_verify's echo before its pairs."""
    pairs = plan.efficiencies
    with echo_server() as address:
        echoes = {pair.verify_ms: echo_ms(address, pair.verify_ms) for pair, _ in pairs}
    for number, (pair, bar) in enumerate(pairs):
        row = measure_efficiency(
            pair, bar, echoes[pair.verify_ms], plan.generations, plan.tokens, folder / str(number)
        )
        advance(f"efficiency {pair.draft_distribution} {pair.verify_ms:g} ms")
        yield row


def run(plan: OverlapPlan, folder: Path, advance: Advance) -> Results:
    """Measure the plan's grids."""
    start = f"{datetime.datetime.now(datetime.UTC):%H:%M} UTC, load {load_average()}"
    efficiencies = tuple(measure_efficiencies(plan, folder / "efficiency", advance))
    detours = tuple(measure_detours()) if plan.distances else ()
    remotes: list[Remote] = []
    for verify_ms in plan.distances:
        for cell in measure_remotes(verify_ms, plan.acceptances, folder / f"delay-{verify_ms:g}"):
            remotes.append(cell)
            advance(f"delay {cell.one_way_ms:g} ms, acceptance {cell.acceptance:g}")
    settings = {"k": str(K), "fan-out": str(FAN_OUT)}
    if efficiencies:
        settings |= {"tokens": str(plan.tokens), "generations": str(plan.generations)}
    return Results((describe() | settings | {"started": start},), efficiencies, tuple(remotes), detours)


def measure_overlap(plan: OverlapPlan, out: Path, name: str, *, add: bool) -> Path:
    """Run the plan on services of its own, and return the report; `add` keeps the other rows of today's report."""
    with measuring("cells", len(plan)) as (folder, advance):
        newer = run(plan, folder, advance)
    earlier = Results.load(report_file(out, name, "json")) if add else Results()
    results = earlier.merge(newer)
    return write_report(out, name, {}, asdict(results), results.markdown(), results.plots())
