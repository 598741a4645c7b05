"""What one step of a model costs by rows and threads: `python -m benchmarks.step_time`.

A session holds 128 rows; each step computes 1, 2, 5 or 9 new ones and returns their logits
(a round of k = 0, 1, 4, 8). Prints median and p99 in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

from benchmarks.environment import as_markdown, describe
from paceline.config import DEFAULT_MODEL, EngineSettings
from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.engine.loading import load_engine

PREFIX = 128
ROWS = (1, 2, 5, 9)
WARM_UP = 3


def step_ms(engine: Engine, rows: int, steps: int) -> tuple[float, float]:
    """Median and p99 of steps of `rows` rows behind the prefix."""
    engine.open(1, PREFIX + rows)
    engine.step(StepPlan((StepItem(1, 0, tuple(range(PREFIX))),)))
    plan = StepPlan((StepItem(1, PREFIX, tuple(range(rows)), logit_rows=tuple(range(rows))),))
    taken = []
    for _ in range(steps + WARM_UP):
        start = time.perf_counter_ns()
        engine.step(plan)
        taken.append((time.perf_counter_ns() - start) / 1e6)
    engine.close(1)
    return float(np.median(taken[WARM_UP:])), float(np.percentile(taken[WARM_UP:], 99))


def main() -> None:
    """Measure and print a Markdown report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    print("# Step time by rows and threads\n")
    print(as_markdown(describe() | {"model": arguments.model, "steps": str(arguments.steps)}))
    variables = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    print("environment:", ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in variables), "\n")
    print("| threads | rows | median ms | p99 ms |\n|---|---|---|---|")
    for threads in range(1, (os.cpu_count() or 1) + 1):
        engine = load_engine(arguments.model, EngineSettings(threads=threads))
        for rows in ROWS:
            median, p99 = step_ms(engine, rows, arguments.steps)
            print(f"| {threads} | {rows} | {median:.1f} | {p99:.1f} |")


if __name__ == "__main__":
    main()
