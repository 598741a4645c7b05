"""The noise and the race of one verification step, on one core: `python -m benchmarks.noise`.

Draws 9 rows of 49,152 ids (k = 8 and the bonus) at fresh positions, so every row computes its
integers, and prints median and p99 in milliseconds. The target is 2 ms.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.environment import as_markdown, describe
from paceline import noise
from paceline.noise import Stream, race
from paceline.types import NoiseKey

ROWS = 9
VOCAB_SIZE = 49_152
TARGET_MS = 2.0


def milliseconds(step: Callable[[int], None], steps: int) -> tuple[float, float]:
    """Median and p99 of `step(0)` … `step(steps - 1)`."""
    taken = []
    for number in range(steps):
        start = time.perf_counter_ns()
        step(number)
        taken.append((time.perf_counter_ns() - start) / 1e6)
    return float(np.median(taken)), float(np.percentile(taken, 99))


def main() -> int:
    """Measure, print, and say by the exit status whether the median is within the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps: int = parser.parse_args().steps
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    noise.warm_up()
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((ROWS, VOCAB_SIZE)) * 3).astype(np.float32)

    def fresh(number: int) -> None:
        for position, row in enumerate(rows):
            race(row, NoiseKey(number), Stream.DRAFT, position)

    def revisited(_: int) -> None:
        fresh(steps)

    revisited(0)
    print(f"{ROWS} rows of {VOCAB_SIZE} ids, one core, {steps} steps\n{as_markdown(describe())}")
    median, tail = milliseconds(fresh, steps)
    print(f"fresh positions      median {median:.2f} ms  p99 {tail:.2f} ms  (target {TARGET_MS:g} ms)")
    again, again_tail = milliseconds(revisited, steps)
    print(f"revisited positions  median {again:.2f} ms  p99 {again_tail:.2f} ms")
    return 0 if median <= TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
