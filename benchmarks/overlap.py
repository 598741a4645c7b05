"""What hiding drafting behind verification brings, on timed models: `python -m benchmarks.overlap`.

Efficiency. A run's own round records are replayed at no cost of coordination (`benchmarks.replay`).
Efficiency is that ideal time over the time that the run took, from its first tokens to its last. Beside
it stands the floor of coordination, measured in the same run: an idle echo over gRPC (`benchmarks.echo`).
T_verify / (T_verify + echo) is what nothing that is coordinated over gRPC can pass where rounds are hits.

Gain. Overlap on (fan-out 4) and off (fan-out 0) run the same requests in turn, through two
coordinators that share one target and one draft; coupled texts are equal, which is checked. The
analytic gain is `benchmarks.analytic.overlap_gain` at the hit rate that the law alone predicts and a
drafting time of k steps; beside it `whole_proposal_gain`, and `overlap_ceiling`, which knows that drafting
ahead takes a step more.

Delay. Services at a distance (`benchmarks.remote`).

Every session is alone on its services, coupled, k = 4; temperature is 1 unless the table says otherwise.
The grids can run in parts: with `--add` a run keeps what else today's report holds, and lists all runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks import remote
from benchmarks.echo import echo_ms, echo_server
from benchmarks.environment import as_markdown, describe
from benchmarks.laws import LAW_OF_ACCEPTANCE
from benchmarks.near import (
    EFFICIENCY_GRID,
    Efficiency,
    Gain,
    efficiency_row,
    gain_grid,
    gain_row,
    loss_row,
    measure_efficiency,
    measure_gain,
)
from benchmarks.remote import Detour, Remote, measure_detours, measure_remotes, remote_rows
from benchmarks.replay import FAN_OUT, K
from benchmarks.reporting import markdown_table
from paceline.bench.environment import load_average

GRIDS = ("efficiency", "gain", "delay")
VERIFY_MS = (30.0, 11.45)
LOSSES = "Where rounds lose, medians in milliseconds:\n"


@dataclass(frozen=True)
class Results:
    """Rows of every table, and the facts of the runs that measured them."""

    runs: tuple[Mapping[str, str], ...] = ()
    efficiencies: tuple[Efficiency, ...] = ()
    gains: tuple[Gain, ...] = ()
    remotes: tuple[Remote, ...] = ()
    detours: tuple[Detour, ...] = ()

    @classmethod
    def load(cls, file: Path) -> Results:
        """What a report's JSON holds; nothing if there is no such file."""
        if not file.exists():
            return cls()
        held = json.loads(file.read_text())
        return cls(
            runs=tuple(held["runs"]),
            efficiencies=tuple(Efficiency(**row) for row in held["efficiencies"]),
            gains=tuple(Gain(**row) for row in held["gains"]),
            remotes=tuple(Remote(**row) for row in held["remotes"]),
            detours=tuple(Detour(**row) for row in held["detours"]),
        )

    def updated(self, newer: Results) -> Results:
        """With the rows of a newer run, in place of its cells' older ones; likewise runs of the same command."""
        commands = {run["command"] for run in newer.runs}
        return Results(
            runs=(*(run for run in self.runs if run["command"] not in commands), *newer.runs),
            efficiencies=_updated(self.efficiencies, newer.efficiencies),
            gains=_updated(self.gains, newer.gains),
            remotes=_updated(self.remotes, newer.remotes),
            detours=_updated(self.detours, newer.detours),
        )

    def markdown(self) -> str:
        """The report."""
        runs = "".join(f"\n{as_markdown(run)}" for run in self.runs)
        return (
            f"# Overlap\n\n"
            f"## Coordination efficiency\n\n{markdown_table([efficiency_row(row) for row in self.efficiencies])}\n"
            f"{LOSSES}\n{markdown_table([loss_row(row) for row in self.efficiencies])}\n"
            f"## Overlap on over off\n\n{markdown_table([gain_row(row) for row in self.gains])}\n"
            f"## Services at a distance\n\n{remote.SETTINGS}\n{markdown_table(remote_rows(self.remotes))}\n"
            f"{remote.DETOURS}\n{markdown_table([asdict(row) for row in self.detours])}\n"
            f"## Runs\n{runs}"
        )

    def save(self, stem: Path) -> None:
        """Write the report's JSON and Markdown."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".json").write_text(json.dumps(asdict(self), indent=2) + "\n")
        stem.with_suffix(".md").write_text(self.markdown())


class _Cell(Protocol):
    @property
    def cell(self) -> tuple[Any, ...]: ...


Row = TypeVar("Row", bound=_Cell)


def _updated(held: Sequence[Row], newer: Sequence[Row]) -> tuple[Row, ...]:
    rows = {row.cell: row for row in (*held, *newer)}
    return tuple(rows[cell] for cell in sorted(rows))


def measure_efficiencies(given: argparse.Namespace, folder: Path) -> list[Efficiency]:
    """The first grid, each T_verify's echo before its pairs."""
    pairs = [(pair, bar) for pair, bar in EFFICIENCY_GRID if pair.verify_ms in given.verify_ms]
    with echo_server() as server:
        echoes = {pair.verify_ms: echo_ms(server.address, pair.verify_ms) for pair, _ in pairs}
    return [
        measure_efficiency(pair, bar, echoes[pair.verify_ms], given.generations, given.tokens, folder / str(number))
        for number, (pair, bar) in enumerate(pairs)
    ]


def measure_gains(given: argparse.Namespace, folder: Path) -> list[Gain]:
    """The second grid."""
    return [
        measure_gain(acceptance, pair, given.generations, given.tokens, folder / str(number))
        for number, (acceptance, pair) in enumerate(gain_grid())
        if pair.verify_ms in given.verify_ms and acceptance in given.acceptances
    ]


def run(given: argparse.Namespace, folder: Path) -> Results:
    """Measure what was asked for."""
    began = f"{datetime.datetime.now(datetime.UTC):%H:%M} UTC, load {load_average()}"
    efficiencies = measure_efficiencies(given, folder / "efficiency") if "efficiency" in given.only else ()
    gains = measure_gains(given, folder / "gain") if "gain" in given.only else ()
    detours: list[Detour] = []
    remotes: list[Remote] = []
    if "delay" in given.only:
        detours = measure_detours()
        for verify_ms in given.verify_ms:
            remotes += measure_remotes(verify_ms, given.acceptances, folder / f"delay-{verify_ms:g}")
    settings = {"k": str(K), "fan-out": str(FAN_OUT)}
    if {"efficiency", "gain"} & {*given.only}:
        settings |= {"tokens": str(given.tokens), "generations": str(given.generations)}
    facts = describe() | settings | {"began": began}
    return Results((facts,), tuple(efficiencies), tuple(gains), tuple(remotes), tuple(detours))


def main() -> None:
    """Run the grids and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=9, help="Generations, or pairs, of a cell; not of delay.")
    parser.add_argument("--tokens", type=int, default=256, help="Tokens of a generation; not of delay.")
    parser.add_argument("--only", nargs="+", choices=GRIDS, default=list(GRIDS), help="Some of the grids.")
    parser.add_argument("--verify-ms", nargs="+", type=float, choices=VERIFY_MS, default=list(VERIFY_MS))
    acceptances = list(LAW_OF_ACCEPTANCE)
    parser.add_argument(
        "--acceptances", nargs="+", type=float, choices=acceptances, default=acceptances, help="Of gain and delay."
    )
    parser.add_argument("--add", action="store_true", help="Keep what else today's report holds.")
    parser.add_argument("--out", type=Path, default=Path("docs/reports"))
    given = parser.parse_args()
    stem = given.out / f"overlap-{datetime.date.today().isoformat()}"
    with tempfile.TemporaryDirectory() as folder:
        found = run(given, Path(folder))
    held = Results.load(stem.with_suffix(".json")) if given.add else Results()
    results = held.updated(found)
    results.save(stem)
    print(results.markdown())


if __name__ == "__main__":
    main()
