"""How many rounds the simulator runs in a second of one core: with the coordinator's planner, with a constant length.

Rounds of all requests over the process's own time, over all pairs of the grid, on dear rows with a quick draft.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from paceline_lab.reporting.presentation import markdown_table, titled_row
from paceline_lab.reporting.reports import load_average, write_rows
from paceline_lab.simulate.grid import GridCase
from paceline_lab.simulate.policies import PLANNED, TARGET_ONLY, Policy
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.synthetic import PAIRS


@dataclass(frozen=True)
class SimulatorSpeed:
    """Of one load; `slowest`: the pair with the fewest rounds a second."""

    sessions: int
    policy: str
    rounds: int
    seconds: float
    rounds_per_second: int
    slowest: str


def measured(sessions: int, policy: Policy) -> SimulatorSpeed:
    """Run every pair; what makes its texts is not counted."""
    rounds: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for pair in PAIRS:
        case = GridCase(pair, sessions, "dear")
        setting, requests = case.setting, case.requests
        began = time.process_time()
        rounds[pair] = simulate(setting, requests, policy).rounds
        seconds[pair] = time.process_time() - began
    slowest = min(PAIRS, key=lambda pair: rounds[pair] / seconds[pair])
    made, took = sum(rounds.values()), sum(seconds.values())
    return SimulatorSpeed(sessions, policy.name, made, took, round(made / took), slowest)


def main() -> None:
    """Print a table, or write the report."""
    parser = argparse.ArgumentParser(description="Rounds a second of the simulator, on one core.")
    parser.add_argument("--sessions", default="1,8,64", help="loads, with commas between")
    parser.add_argument("--out", type=Path, help="folder of the report")
    arguments = parser.parse_args()
    load = load_average()
    loads = [int(count) for count in arguments.sessions.split(",")]
    rows = [measured(count, policy) for count in loads for policy in (PLANNED, Policy(4), Policy(4, 0), TARGET_ONLY)]
    table = markdown_table([titled_row(row) for row in rows])
    if arguments.out is not None:
        write_rows(arguments.out, "simulator-speed", {"load average before": load}, rows, f"{__doc__ or ''}\n{table}")
    print(table)


if __name__ == "__main__":
    main()
