"""The simulator beside real services: recorded runs, replayed on a virtual clock.

`python -m paceline_lab.bench.validation --traces FOLDER` serves every cell by the services of `paceline serve`,
records it, and replays the record as `paceline simulate --trace` does. A cell whose trace is in the folder is not
served again. The first request in each place is served and simulated too, and not counted: it is what a fresh planner
learns from. The speed is that of a request behind its first round. Each cell is served twice. What the two runs of
target-only differ by is the machine's noise, and a cell is near when it is within 5 % or within that. What its own
two runs differ by is its spread: sessions that wait for drafts fall into step, or out of it, for a whole run.

The table pair waits where a model computes, but all processes share this machine's cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from paceline.protocol.errors import require
from paceline_lab.bench.prompts import load_prompts
from paceline_lab.bench.record import RecordPlan, record_trace
from paceline_lab.bench.simulated_pair import SimulatedPair
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, load_average, write_report
from paceline_lab.simulate.policies import Policy
from paceline_lab.simulate.report import NEAR, measured_speed
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.trace import Trace, read_trace

TABLE = SimulatedPair("distribution=middling", 20.0, 2.0, target_row_ms=0.05, draft_row_ms=0.02)
MODELS: Mapping[str, tuple[str, str]] = {
    "table": (TABLE.target, TABLE.drafter),
    "smollm2-135m": ("smollm2-135m", "auto"),
}
"""A target and a drafter, as `paceline serve` takes them."""
POLICIES = ("0", "4", "auto")
"""As `paceline simulate --k` takes them."""
AGAIN = " again"
WAVES = 2
"""Requests one after the other in each place, behind the first, which makes links, caches and costs known."""


@dataclass(frozen=True)
class ValidationCell:
    """One real run: of which models, with so many requests at once."""

    model: str
    sessions: int
    k: str

    @property
    def policy(self) -> Policy:
        """Return the simulator's policy."""
        return Policy.parse(self.k.removesuffix(AGAIN))

    def file(self, folder: Path) -> Path:
        """Return where its trace is kept."""
        return folder / f"{self.model}-{self.sessions}-{self.k.replace(' ', '-')}.jsonl"


@dataclass(frozen=True)
class Deviation:
    """Tokens per second of a request behind its first round.

    Attributes:
        noise, spread: what two runs of target-only differ by, and two of the cell itself, as shares.
    """

    cell: ValidationCell
    measured_speed: float
    replayed_speed: float
    noise: float
    spread: float
    load: str

    @property
    def is_near(self) -> bool:
        """Whether the replay is within the bar."""
        return abs(self.error) <= max(NEAR, self.noise)

    @property
    def is_within_spread(self) -> bool:
        """Whether it is, or as near as another real run."""
        return self.is_near or abs(self.error) <= self.spread

    @property
    def error(self) -> float:
        """How far the replay is off, as a share; above 0 it is too fast."""
        return self.replayed_speed / self.measured_speed - 1

    def row(self) -> dict[str, object]:
        """Return a row of the table."""
        return {
            "models": self.cell.model,
            "sessions": self.cell.sessions,
            "k": self.cell.k,
            "measured tokens/s": round(self.measured_speed, 2),
            "replayed": round(self.replayed_speed, 2),
            "off by": f"{self.error:+.1%}",
            "noise": f"{self.noise:.1%}",
            "spread": f"{self.spread:.1%}",
            "near": "yes" if self.is_near else "within its spread" if self.is_within_spread else "no",
            "load": self.load,
        }


def served_trace(cell: ValidationCell, folder: Path, tokens: int) -> Trace:
    """Return the trace of a cell, which is served if there is none yet."""
    file = cell.file(folder)
    if file.exists():
        return read_trace(file)
    model, drafter = MODELS[cell.model]
    policy = cell.policy
    plan = RecordPlan(
        [prompt for kind in load_prompts().values() for prompt in kind],
        requests=(1 + WAVES) * cell.sessions,
        sessions=cell.sessions,
        tokens=tokens,
        num_draft_tokens=policy.tokens,
        fan_out=policy.fan_out,
        notes={"load average before": load_average()},
    )
    return record_trace(model, drafter, plan, file)


def counted_speed(cell: ValidationCell, trace: Trace) -> float:
    """Return the measured speed, without the first request in each place."""
    return measured_speed(trace.requests[cell.sessions :])


def replayed_speed(cell: ValidationCell, trace: Trace) -> float:
    """Return the simulated speed of the same requests."""
    run = simulate(trace.setting, trace.requests, cell.policy)
    return replace(run, requests=run.requests[cell.sessions :]).decode_tokens_per_second


def validate(models: Sequence[str], sessions: Sequence[int], folder: Path, tokens: int) -> list[Deviation]:
    """Serve and replay every cell; the policies of one load come one after the other."""
    deviations: list[Deviation] = []
    for model, count in product(models, sessions):
        cells = [ValidationCell(model, count, k + again) for k in POLICIES for again in ("", AGAIN)]
        traces = {cell.k: served_trace(cell, folder, tokens) for cell in cells}
        speeds = {cell.k: counted_speed(cell, traces[cell.k]) for cell in cells}
        spreads = {k: abs(speeds[k + AGAIN] / speeds[k] - 1) for k in POLICIES}
        deviations += [
            Deviation(
                cell,
                speeds[cell.k],
                replayed_speed(cell, traces[cell.k]),
                spreads["0"],
                spreads[cell.k],
                traces[cell.k].setting.notes.get("load average before", ""),
            )
            for cell in cells
            if cell.k in POLICIES
        ]
    return deviations


def validation_text(deviations: Sequence[Deviation]) -> str:
    """Write the report."""
    near, within = sum(each.is_near for each in deviations), sum(each.is_within_spread for each in deviations)
    counts = f"Near: {near} of {len(deviations)}; near, or within its spread: {within}."
    table = markdown_table([each.row() for each in deviations])
    return f"# The simulator beside real services\n\n{__doc__ or ''}\n{counts}\n\n{table}"


def main() -> None:
    """Serve, replay and print, or write the report."""
    parser = argparse.ArgumentParser(description="The simulator beside real services.")
    parser.add_argument("--traces", type=Path, required=True, help="folder of recorded runs, which are kept")
    parser.add_argument("--models", default=",".join(MODELS), help="with commas between")
    parser.add_argument("--sessions", default="1,4,8,16,64", help="requests at once, with commas between")
    parser.add_argument("--tokens", type=int, default=96, help="of a request")
    parser.add_argument("--out", type=Path, default=None, help="folder of the report")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    for model in models:
        require(model in MODELS, "models", model, f"one of: {', '.join(MODELS)}")
    arguments.traces.mkdir(parents=True, exist_ok=True)
    sessions = [int(each) for each in arguments.sessions.split(",")]
    deviations = validate(models, sessions, arguments.traces, arguments.tokens)
    text = validation_text(deviations)
    if arguments.out is not None:
        facts = describe() | {"table pair": f"{TABLE.target}, {TABLE.draft}", "tokens": str(arguments.tokens)}
        write_report(
            arguments.out, "simulator-validation", facts, {"cells": [each.row() for each in deviations]}, text
        )
    print(text)


if __name__ == "__main__":
    main()
