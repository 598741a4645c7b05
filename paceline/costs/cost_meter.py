"""Corrects a service's cost line with every step that runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.costs.cost_line import LEAST_STEP_MS, CostLine
from paceline.costs.running_mean import SPEED_MEMORY, RunningMean, speed
from paceline.costs.service_costs import LEAST_MOVE, UNKNOWN_LINE

SIZE_MEMORY = SPEED_MEMORY / LEAST_MOVE
"""Steps that the factor of one size remembers. A change of the machine's speed is known after `SPEED_MEMORY` steps.
In the factor of the size that ran meanwhile it leaves no more of itself than a line may move by unsaid."""
SURGE = 1.5
"""A step counts at most as this many times the machine's present speed. A shared machine slows down for good by
about as much, and a single pause moves a line by 4 %."""


@dataclass
class _StepsOfSize:
    rows: RunningMean
    factor: RunningMean  # of the base line


class CostMeter:
    """Learns the factors by which steps differ from a base line: one for all steps, and one for each size.

    The factor of all steps is the machine's speed, which changes for every size at once, so it forgets quickly. With
    factors by size alone, a rare size would keep the times of a moment when the speed was another. A size that has no
    step takes the nearest one's factor. So longer contexts, or a draft on the same machine, move the whole line.
    """

    def __init__(self, base: CostLine = UNKNOWN_LINE) -> None:
        self.base = self.line = base
        """The line that factors multiply, and as stated now: it moves when a point does by more than `LEAST_MOVE`."""
        self._sizes: dict[int, _StepsOfSize] = {}
        self._speed = speed()

    def observe(self, rows: int, ms: float) -> None:
        """Learn from a step of `rows` that took `ms`."""
        ms = max(ms, LEAST_STEP_MS)
        if not self.base.is_known:
            self.base = CostLine(((rows, ms),))
        steps = self._sizes.get(_size(rows))
        if steps is None:
            factor = RunningMean(self._factor(rows), 1.0, SIZE_MEMORY)
            steps = self._sizes[_size(rows)] = _StepsOfSize(RunningMean(rows, 0.0), factor)
        steps.rows.add(rows)
        self._speed.add_ratio(ms, self.base.ms(rows) * steps.factor.value, SURGE)
        steps.factor.add_ratio(ms, self.base.ms(rows) * self._speed.value)
        mean_rows = steps.rows.value
        new_ms = self.base.ms(mean_rows) * steps.factor.value * self._speed.value
        stated_ms = self.line.ms(mean_rows)
        if abs(new_ms - stated_ms) > LEAST_MOVE * stated_ms:
            self.line = CostLine.rising(self._points())

    def _points(self) -> list[tuple[float, float, float]]:
        """Rows, ms and weight of each size: the mean of its steps or, where it has none, the corrected base line."""
        points = {size: (one.rows.value, one.factor.value, one.factor.weight) for size, one in self._sizes.items()}
        for rows, _ in self.base.points:
            points.setdefault(_size(rows), (rows, self._factor(rows), 1.0))
        return [
            (rows, self.base.ms(rows) * factor * self._speed.value, weight)
            for _, (rows, factor, weight) in sorted(points.items())
        ]

    def _factor(self, rows: float) -> float:
        """The factor at `rows`: interpolated between sizes with steps, and the nearest one's beyond them."""
        factors = sorted((steps.rows.value, steps.factor.value) for steps in self._sizes.values())
        return float(np.interp(rows, *np.array(factors).T)) if factors else 1.0


class MeterPair:
    """Two lines of a service: one of its steps, and one of those that run beside the other service's."""

    def __init__(self, base: CostLine = UNKNOWN_LINE) -> None:
        self.alone, self.beside = CostMeter(base), CostMeter()

    def observe(self, rows: int, ms: float, *, beside: bool) -> None:
        """Learn from a step of `rows` that took `ms`."""
        if beside:
            self.beside.base = self.alone.line
        (self.beside if beside else self.alone).observe(rows, ms)


def _size(rows: float) -> int:
    """Sizes are octaves: steps of 1 row, of 2 and 3, of 4 to 7, …"""
    return int(rows).bit_length()
