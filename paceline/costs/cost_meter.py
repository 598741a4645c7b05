"""Measures a service's cost line: at load, and from then on with every step that runs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

from paceline.costs.acceptance import MAX_DEPTH
from paceline.costs.cost_line import LEAST_STEP_MS, CostLine
from paceline.costs.running_mean import SPEED_MEMORY, Correction, RunningMean
from paceline.costs.service_costs import LEAST_MOVE, UNKNOWN_LINE
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

MOST_ROWS = 4096
"""Rows beyond which steps are of one size. Sizes are octaves: steps of 1 row, of 2 and 3, of 4 to 7, …"""
SIZE_MEMORY = SPEED_MEMORY / LEAST_MOVE
"""Steps that the factor of one size remembers. A change of the machine's speed is known after `SPEED_MEMORY` steps.
In the factor of the size that ran meanwhile it leaves no more of itself than a line may move by unsaid."""
SURGE = 1.5
"""A step counts at most as this many times the machine's present speed. A shared machine slows down for good by
about as much, and a single pause moves a line by 4 %."""
SLOPE_ROWS = MAX_DEPTH // 2
"""Rows of the second step that is timed at load, as a proposal may have: with the first it gives a line its slope."""
REPEATS = 3
"""Steps of each size; their median is not moved by one that was interrupted."""
MEASURING_MS = 1000.0
"""Time for repeated steps. After twice that time no step begins. Loading a model whose steps are that long takes many
times as long."""


@dataclass
class _StepsOfSize:
    rows: RunningMean
    factor: Correction
    """Of the base line at this size."""


class CostMeter:
    """Learns the factors by which steps differ from a base line: one for all steps, and one for each size.

    The factor of all steps is the machine's speed, which changes for every size at once, so it forgets quickly. With
    factors by size alone, a rare size would keep the times of a moment when the speed was another, and a row would
    look too dear or free. A size that has had no step takes the factor of the nearest size that has. So longer
    contexts, or a draft on the same machine, move the whole line.
    """

    def __init__(self, base: CostLine = UNKNOWN_LINE) -> None:
        self.base = base
        """The line that factors multiply; it may be replaced."""
        self.line = base
        """The line as stated now. It is replaced when a step moves a point by more than `LEAST_MOVE`."""
        self._sizes: dict[int, _StepsOfSize] = {}
        self._speed = Correction(most=SURGE)

    @property
    def is_measured(self) -> bool:
        """Whether a step has been observed."""
        return bool(self._sizes)

    def observe(self, rows: int, ms: float) -> None:
        """Learn from a step of `rows` that took `ms`."""
        ms = max(ms, LEAST_STEP_MS)
        if not self.base.is_known:
            self.base = CostLine(((rows, ms),))
        steps = self._sizes.get(_size(rows))
        if steps is None:
            factor = Correction(RunningMean(self._factor(rows), 1.0, limit=SIZE_MEMORY))
            steps = self._sizes[_size(rows)] = _StepsOfSize(RunningMean(rows, 0.0), factor)
        steps.rows.add(min(rows, MOST_ROWS))
        self._speed.learn(ms, self.base.ms(rows) * steps.factor.value)
        steps.factor.learn(ms, self.base.ms(rows) * self._speed.value)
        mean_rows = steps.rows.value
        new_ms = self.base.ms(mean_rows) * steps.factor.value * self._speed.value
        stated_ms = self.line.ms(mean_rows)
        if abs(new_ms - stated_ms) > LEAST_MOVE * stated_ms:
            self.line = _rising(self._points())

    def _points(self) -> list[tuple[float, float, float]]:
        """Rows, ms and weight of each size: the mean of its steps or, where it has none, the corrected base line."""
        points = {
            size: (steps.rows.value, steps.factor.value, steps.factor.mean.weight)
            for size, steps in self._sizes.items()
        }
        for rows, _ in self.base.points:
            points.setdefault(_size(rows), (rows, self._factor(rows), 1.0))
        return [
            (rows, self.base.ms(rows) * factor * self._speed.value, weight)
            for _, (rows, factor, weight) in sorted(points.items())
        ]

    def _factor(self, rows: float) -> float:
        """The factor at `rows`: interpolated between sizes with steps, and the nearest one's beyond them."""
        factors = sorted((steps.rows.value, steps.factor.value) for steps in self._sizes.values())
        if not factors:
            return 1.0
        return float(np.interp(rows, [place for place, _ in factors], [factor for _, factor in factors]))


def _size(rows: float) -> int:
    return int(min(rows, MOST_ROWS)).bit_length()


def _rising(points: Iterable[tuple[float, float, float]]) -> CostLine:
    """The line of points (rows, ms, weight); neighbours that fall share their weighted mean (isotonic regression)."""
    runs: list[tuple[list[float], float, float]] = []
    for rows, ms, weight in points:
        run = [rows], ms, weight
        while runs and runs[-1][1] > run[1]:
            before_rows, before_ms, before_weight = runs.pop()
            total = before_weight + run[2]
            run = [*before_rows, *run[0]], (before_ms * before_weight + run[1] * run[2]) / total, total
        runs.append(run)
    return CostLine(tuple((rows, max(ms, LEAST_STEP_MS)) for run, ms, _ in runs for rows in run))


def measure_line(step: Callable[[int], float], most_rows: int) -> CostLine:
    """Measure the cost line of a service that has just loaded, by a few real steps of each size.

    Args:
        step: runs a step of so many rows; returns how long it took, milliseconds.
        most_rows: that a step can have; at least 1.
    """
    total_ms = longest_ms = step(1)  # it compiles, or touches pages for the first time
    times = {1: total_ms} if total_ms > MEASURING_MS else {}
    octaves = (1 << power for power in range(MAX_PROPOSAL_NODES.bit_length()))
    for rows in sorted(octaves, key=lambda rows: rows not in (1, SLOPE_ROWS)):
        if rows > most_rows or rows in times:
            continue
        may_repeat = total_ms + REPEATS * longest_ms <= MEASURING_MS
        needs_slope = total_ms <= 2 * MEASURING_MS and len(times) < 2
        if not (may_repeat or needs_slope):
            break
        rounds = [step(rows) for _ in range(REPEATS if may_repeat else 1)]
        total_ms += sum(rounds)
        times[rows] = median(rounds)
        longest_ms = max(times.values())
    return _rising((rows, ms, 1.0) for rows, ms in sorted(times.items()))
