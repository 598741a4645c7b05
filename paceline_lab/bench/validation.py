"""The simulator beside real services: timed table models, one or several of each, at a distance, under load.

`python -m paceline_lab.bench.validation` runs every cell of the grid on services of its own and simulates it twice:

- replayed: with costs from the cell's own records, as `paceline simulate --trace` does;
- predicted: with the models' stated times, the stated delay, and what one session on one target without delay took
  beyond them.

Both take each token's rank in the draft's order from what the draft service said of the run. The first request in
each place is run and simulated too, and not counted: it is what a fresh planner learns from. The speed is that of a
request behind its first round. Table models wait where a real one computes, but all processes share this machine's
cores: where those are busy the prediction is of a machine that has enough of them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from coordinator.recorder import FILE
from paceline.costs.cost_line import CostLine
from paceline.local.services import LocalServices
from paceline.protocol.errors import require
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.proposal import MODEL
from paceline.runtime.files import replace_text
from paceline_lab.bench.record import read_recordings, run_requests, trace_of
from paceline_lab.bench.simulated.delay import DelayProxy
from paceline_lab.bench.simulated.services import SimulatedPair, drafted, request
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.progress import progress_bar, stderr_console
from paceline_lab.reporting.reports import describe, load_average, write_report
from paceline_lab.simulate.policies import Policy
from paceline_lab.simulate.report import NEAR, measured_speed
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.trace import Trace, TracedSetting

PAIR = SimulatedPair("distribution=middling", 20.0, 2.0, target_row_ms=0.05, draft_row_ms=0.02)
SPECULATION_OF_K: Mapping[str, tuple[SpeculationSettings, int]] = {
    "0": (SpeculationSettings(off=True), 0),
    "4": (drafted(4), 0),
    "4+ahead": (drafted(4), 4),
    "auto": (drafted(None), 4),
}
"""For each value of `paceline simulate --k`: the request's settings, and the coordinator's fan-out."""
WAVES = 2
"""Requests one after the other in each place, behind the first, which makes links, caches and costs known."""


@dataclass(frozen=True)
class ValidationCell:
    """One real run: targets and as many draft services, requests at once, the delay of every link, and `--k`."""

    replicas: int
    sessions: int
    one_way_ms: float
    k: str

    @property
    def policy(self) -> Policy:
        """Return the simulator's policy."""
        return Policy.parse(self.k, SPECULATION_OF_K[self.k][1])


@dataclass(frozen=True)
class Deviation:
    """Tokens per second of a request behind its first round, and the load that others put on the machine."""

    cell: ValidationCell
    measured_speed: float
    replayed_speed: float
    predicted_speed: float
    load: str

    def row(self) -> dict[str, object]:
        """Return a row of the table."""
        off = self.replayed_speed / self.measured_speed - 1
        return {
            "replicas": self.cell.replicas,
            "sessions": self.cell.sessions,
            "one way ms": self.cell.one_way_ms,
            "k": self.cell.k,
            "measured tokens/s": round(self.measured_speed, 2),
            "replayed": round(self.replayed_speed, 2),
            "off by": f"{off:+.1%}",
            f"within {NEAR:.0%}": "yes" if abs(off) <= NEAR else "no",
            "predicted": round(self.predicted_speed, 2),
            "prediction off by": f"{self.predicted_speed / self.measured_speed - 1:+.1%}",
            "load": self.load,
        }


class ReplicaServices(LocalServices):
    """Targets and draft services of one pair, each behind a forwarder that delays."""

    def __init__(self, folder: Path, pair: SimulatedPair, replicas: int, one_way_ms: float) -> None:
        super().__init__(folder)
        self._pair, self._replicas, self._one_way_ms = pair, replicas, one_way_ms
        self._forwarders = ExitStack()

    def start_all(self) -> None:
        """Start all services, and wait for them."""
        # `await_links` waits for drafts where one service is called so.
        more = range(1, self._replicas)
        labels = {role: [role, *(f"{role}-{number}" for number in more)] for role in ("target", "draft")}
        for label in labels["target"]:
            self.start(label, "target", {"model": self._pair.target, "server.port": 0})
        for label in labels["draft"]:
            self.start(label, "draft", {"drafters": [f"{MODEL}:{self._pair.draft}"], "server.port": 0})
        self.await_serving(*labels["target"], *labels["draft"])
        for role, role_labels in labels.items():
            addresses = [self._forwarder_address(self.address_of(label)) for label in role_labels]
            replace_text(self.folder / role, "".join(f"{address}\n" for address in addresses))

    def coordinator_flags(self) -> dict[str, object]:
        """Return a coordinator's flags, by which it finds its peers in files."""
        return {
            "model": self._pair.target,
            "server.port": 0,
            "target.address": f"file:{self.folder / 'target'}",
            "draft.address": f"file:{self.folder / 'draft'}",
        }

    def stop(self) -> None:
        """Stop the forwarders, then the services."""
        self._forwarders.close()
        super().stop()

    def _forwarder_address(self, address: str) -> str:
        if not self._one_way_ms:
            return address
        return self._forwarders.enter_context(DelayProxy.to(address, self._one_way_ms)).address


def run_cell(cell: ValidationCell, tokens: int, pair: SimulatedPair = PAIR) -> Trace:
    """Run one cell on services of its own."""
    settings, fan_out = SPECULATION_OF_K[cell.k]
    requests = [request(number, tokens, settings) for number in range((1 + WAVES) * cell.sessions)]
    with tempfile.TemporaryDirectory(prefix="paceline-validation-") as name:
        folder = Path(name)
        with (
            ReplicaServices(folder / "services", pair, cell.replicas, cell.one_way_ms) as services,
            services.coordinator("recording", {"record_to": str(folder), "fan_out": fan_out}) as address,
        ):
            runs = asyncio.run(run_requests(address, requests, cell.sessions, _nobody))
        recordings = read_recordings(folder / FILE)
    return trace_of(runs, recordings, concurrency=cell.sessions, fan_out=fan_out)


def deviation(cell: ValidationCell, trace: Trace, alone: Trace, load: str) -> Deviation:
    """Simulate a cell with its own costs, and with those of the cell alone."""

    first = cell.sessions

    def speed(setting: TracedSetting) -> float:
        run = simulate(setting, trace.requests, cell.policy, replicas=cell.replicas)
        return replace(run, requests=run.requests[first:]).decode_tokens_per_second

    prediction = speed(predicted_setting(cell, trace.setting, alone.setting))
    return Deviation(cell, measured_speed(trace.requests[first:]), speed(trace.setting), prediction, load)


def predicted_setting(
    cell: ValidationCell, own: TracedSetting, alone: TracedSetting, pair: SimulatedPair = PAIR
) -> TracedSetting:
    """Return a cell's setting from the models' stated times and what the cell alone took beyond them."""
    target = stated_line(pair.verify_ms, pair.target_row_ms, alone.alone)
    draft = stated_line(pair.draft_ms, pair.draft_row_ms, alone.draft)
    return own.of_run(
        alone=target,
        beside=CostLine(),
        draft=draft if own.draft.is_known else CostLine(),
        coordinator_ms=alone.coordinator_ms,
        gap_ms=alone.gap_ms,
        draft_gap_ms=alone.draft_gap_ms,
        target_one_way_ms=alone.target_one_way_ms + cell.one_way_ms,
        draft_one_way_ms=alone.draft_one_way_ms + cell.one_way_ms,
    )


def stated_line(step_ms: float, row_ms: float, measured_line: CostLine) -> CostLine:
    """Return a table model's cost line, with what a step of one row took beyond its stated time."""
    beyond_ms = max(0.0, measured_line.ms(1) - step_ms - row_ms) if measured_line.is_known else 0.0
    return CostLine(tuple((rows, step_ms + row_ms * rows + beyond_ms) for rows in (1.0, 1025.0)))


def validate(cells: Sequence[ValidationCell], tokens: int) -> list[Deviation]:
    """Run and simulate every cell; the cell alone of each k comes first."""
    alone = {k: ValidationCell(1, 1, 0.0, k) for k in dict.fromkeys(cell.k for cell in cells)}
    deviations: list[Deviation] = []
    with progress_bar(stderr_console(), "cells", len(alone) + len(cells)) as advance:
        calibration: dict[str, Trace] = {}
        for k, cell in alone.items():
            calibration[k] = run_cell(cell, tokens)
            advance(f"alone, k = {k}")
        for cell in cells:
            load, trace = load_average(), run_cell(cell, tokens)
            deviations.append(deviation(cell, trace, calibration[cell.k], load))
            advance(str(cell))
    return deviations


def validation_text(deviations: Sequence[Deviation]) -> str:
    """Write the report."""
    near = sum(abs(each.replayed_speed / each.measured_speed - 1) <= NEAR for each in deviations)
    near_predicted = sum(abs(each.predicted_speed / each.measured_speed - 1) <= NEAR for each in deviations)
    return (
        f"# The simulator beside real services\n\n{__doc__ or ''}\n"
        f"Within {NEAR:.0%}: {near} of {len(deviations)} replayed, {near_predicted} predicted.\n\n"
        f"{markdown_table([each.row() for each in deviations])}"
    )


def main() -> None:
    """Run the grid and print it, or write the report."""
    parser = argparse.ArgumentParser(description="The simulator beside real services on timed table models.")
    parser.add_argument("--sessions", default="1,4,16,64", help="requests at once, with commas between")
    parser.add_argument("--replicas", default="1,2", help="targets, and as many draft services")
    parser.add_argument("--one-way-ms", default="0,5", help="delays of every link")
    parser.add_argument("--k", default=",".join(SPECULATION_OF_K), help="as paceline simulate --k takes it")
    parser.add_argument("--tokens", type=int, default=96, help="of a request")
    parser.add_argument("--out", type=Path, default=None, help="folder of the report")
    arguments = parser.parse_args()
    ways = arguments.k.split(",")
    for k in ways:
        require(k in SPECULATION_OF_K, "k", k, f"one of: {', '.join(SPECULATION_OF_K)}")
    grid = product(_numbers(arguments.replicas), _numbers(arguments.sessions), _numbers(arguments.one_way_ms), ways)
    cells = [ValidationCell(int(replicas), int(sessions), ms, k) for replicas, sessions, ms, k in grid]
    deviations = validate(cells, arguments.tokens)
    if arguments.out is not None:
        facts = describe() | {"target": PAIR.target, "draft": PAIR.draft, "tokens": str(arguments.tokens)}
        values = {"cells": [asdict(each) for each in deviations]}
        write_report(arguments.out, "simulator-validation", facts, values, validation_text(deviations))
    print(validation_text(deviations))


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _nobody(_: str) -> None:
    """Nobody is shown what is done."""


if __name__ == "__main__":
    main()
