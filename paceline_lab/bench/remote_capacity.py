"""The capacity gain of drafts made elsewhere, measured on real services and beside the simulator and the formula.

`python -m paceline_lab.bench.remote_capacity`. Two pairs of services on timed table models: a target whose steps
have the γ steps of a draft in them, with a draft that takes no time, and one whose draft has a service of its own.
Requests of k = γ at each number of clients run against both, one after the other. Table models wait where a real one
computes, but all processes share this machine's cores: at many clients those are what is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline_lab.bench.simulated.services import SimulatedPair
from paceline_lab.bench.validation import ValidationCell, predicted_setting, run_cell
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, load_average, write_report
from paceline_lab.simulate.report import measured_speed
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.studies.capacity import GAMMA, TimedPair

TOKENS = 64


@dataclass(frozen=True)
class MeasuredCapacity:
    """Tokens per second of a client: the target drafts itself, and drafts are elsewhere; measured and simulated."""

    clients: int
    itself: float
    elsewhere: float
    simulated_itself: float
    simulated_elsewhere: float
    claimed: float
    load: str

    def row(self) -> dict[str, object]:
        """A table's line."""
        return {
            "clients": self.clients,
            "target drafts itself tokens/s": round(self.itself, 2),
            "drafts elsewhere tokens/s": round(self.elsewhere, 2),
            "gain": round(self.elsewhere / self.itself, 3),
            "simulated gain": round(self.simulated_elsewhere / self.simulated_itself, 3),
            "1 + γ·t_d ÷ t_v": round(self.claimed, 3),
            "load": self.load,
        }


def timed_models(pair: TimedPair, *, elsewhere: bool) -> SimulatedPair:
    """Table models with a pair's times."""
    if elsewhere:
        return SimulatedPair("distribution=middling", pair.target_ms, pair.draft_ms, pair.row_ms, pair.draft_row_ms)
    step_ms = pair.target_ms + GAMMA * pair.draft_ms
    row_ms = pair.row_ms + GAMMA * pair.draft_row_ms / (GAMMA + 1)
    return SimulatedPair("distribution=middling", step_ms, 0.0, row_ms, 0.0)


def measure(pair: TimedPair, clients: Sequence[int], tokens: int) -> list[MeasuredCapacity]:
    """Run every number of clients on both."""
    both = [timed_models(pair, elsewhere=elsewhere) for elsewhere in (False, True)]
    alone = [run_cell(ValidationCell(1, 1, 0.0, str(GAMMA)), tokens, models) for models in both]
    found = []
    for count in clients:
        cell, load = ValidationCell(1, count, 0.0, str(GAMMA)), load_average()
        speeds: list[tuple[float, float]] = []
        for models, first in zip(both, alone, strict=True):
            trace = run_cell(cell, tokens, models)
            setting = predicted_setting(cell, trace.setting, first.setting, models)
            simulated = simulate(setting, trace.requests, cell.policy).decode_tokens_per_second
            speeds.append((measured_speed(trace.requests), simulated))
        (itself, simulated_itself), (elsewhere, simulated_elsewhere) = speeds
        claimed = pair.claimed(count)
        found.append(MeasuredCapacity(count, itself, elsewhere, simulated_itself, simulated_elsewhere, claimed, load))
    return found


def main() -> None:
    """Measure and print it, or write the report."""
    parser = argparse.ArgumentParser(description="The capacity gain of drafts made elsewhere, on real services.")
    parser.add_argument("--clients", default="1,4,16,32", help="requests at once, with commas between")
    parser.add_argument("--row-ms", type=float, default=0.05, help="of the target")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a request")
    parser.add_argument("--out", type=Path, default=None, help="folder of the report")
    given = parser.parse_args()
    pair = TimedPair("timed", row_ms=given.row_ms)
    found = measure(pair, [int(each) for each in given.clients.split(",")], given.tokens)
    text = f"# Capacity of drafts made elsewhere\n\n{__doc__ or ''}\n{markdown_table([each.row() for each in found])}"
    if given.out is not None:
        facts = describe() | {"pair": str(pair), "γ": str(GAMMA), "tokens": str(given.tokens)}
        write_report(given.out, "remote-capacity", facts, {"cells": [asdict(each) for each in found]}, text)
    print(text)


if __name__ == "__main__":
    main()
