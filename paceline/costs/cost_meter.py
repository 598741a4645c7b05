"""Measures a service's cost line: at load, and from then on with every step that runs. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from paceline.costs.cost_line import LEAST_STEP_MS, CostLine
from paceline.costs.running_mean import RunningMean
from paceline.costs.service_costs import LEAST_MOVE, UNKNOWN_LINE

_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 4096)
"""Largest rows of each bucket. So a line has at most 16 points. Up to 64 rows, where decode steps are, the steps of a
bucket differ by a half at most."""
OUTLIER = 3.0
"""A step counts at most as this many times the expected time of its size."""
SIZE_STEPS = 200.0
"""Steps that the factor of one size remembers. A change of the machine's speed is known after `SPEED_STEPS` steps. It
leaves 8 % of itself in the factor of the size that ran meanwhile."""
SURGE = 1.5
"""A step counts at most as this many times the machine's present speed. A shared machine slows down for good by about
as much, and a single pause moves a line by 4 %."""
SPEED_STEPS = 16.0
"""Steps that the machine's speed remembers, whatever their rows. They are fewer than a request's rounds, since the
speed of a shared machine changes within one request."""
MEASURED_ROWS = (1, 8, 2, 4, 16, 32, 64)
"""Rows of the steps that are timed at load, in this order. The first two give a line its slope."""
LEAST_SIZES = 2
"""Sizes that are timed at least once even where time is short: without a slope nothing can be planned."""
REPEATS = 3
"""Steps of each size; their median is not moved by one that was interrupted."""
MEASURING_MS = 1000.0
"""Time for repeated steps. After twice that time no step begins. Loading a model whose steps are that long takes many
times as long."""


@dataclass
class _StepsOfSize:
    rows: RunningMean
    factor: RunningMean
    """Mean ratio of a step's time to the base line's."""


@dataclass
class _Point:
    rows: float
    ms: float
    weight: float


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
        self._buckets: dict[int, _StepsOfSize] = {}
        self._speed = RunningMean(1.0, 1.0, limit=SPEED_STEPS)
        """Mean ratio of a step's time to what the base and the factor of its size give."""

    @property
    def is_measured(self) -> bool:
        """Whether a step has been observed."""
        return bool(self._buckets)

    def observe(self, rows: int, ms: float) -> None:
        """Learn from a step of `rows` that took `ms`."""
        ms = max(ms, LEAST_STEP_MS)
        if not self.base.is_known:
            self.base = CostLine(((rows, ms),))
        place = bisect_left(_EDGES, min(rows, _EDGES[-1]))
        prior_factor = self._factor(rows)
        bucket = self._buckets.setdefault(
            place, _StepsOfSize(RunningMean(rows, 0), RunningMean(prior_factor, 1, SIZE_STEPS))
        )
        bucket.rows.add(min(rows, _EDGES[-1]))
        ratio, speed, factor = ms / self.base.ms(rows), self._speed, bucket.factor
        speed.add(min(ratio / factor.value, SURGE * speed.value))
        factor.add(min(ratio / speed.value, OUTLIER * factor.value))
        mean_rows = bucket.rows.value
        new_ms, stated_ms = self.base.ms(mean_rows) * factor.value * speed.value, self.line.ms(mean_rows)
        if abs(new_ms - stated_ms) > LEAST_MOVE * stated_ms:
            self.line = CostLine(
                tuple((point.rows, max(point.ms, LEAST_STEP_MS)) for point in _rising(self._points()))
            )

    def _points(self) -> list[_Point]:
        """A point for each bucket: the mean of its steps or, where it has none, the base's point times the factor."""
        points = dict[int, _Point]()
        for place, bucket in self._buckets.items():
            rows, factor = bucket.rows.value, bucket.factor
            points[place] = _Point(rows, self.base.ms(rows) * factor.value * self._speed.value, factor.weight)
        for rows, ms in self.base.points:
            expected_ms = ms * self._factor(rows) * self._speed.value
            points.setdefault(bisect_left(_EDGES, rows), _Point(rows, expected_ms, 1.0))
        return [points[place] for place in sorted(points)]

    def _factor(self, rows: float) -> float:
        """The factor at `rows`: interpolated between buckets with steps, and the nearest one's beyond them."""
        factors = sorted((bucket.rows.value, bucket.factor.value) for bucket in self._buckets.values())
        if not factors:
            return 1.0
        for (low, low_factor), (high, high_factor) in pairwise(factors):
            if low <= rows <= high:
                return low_factor + (high_factor - low_factor) * (rows - low) / (high - low)
        return factors[0][1] if rows < factors[0][0] else factors[-1][1]


def _rising(points: Sequence[_Point]) -> list[_Point]:
    """The points with times that never fall: neighbours that fall share their weighted mean (isotonic regression)."""
    runs: list[list[_Point]] = []
    for point in points:
        runs.append([point])
        while len(runs) > 1 and _mean(runs[-2]) > _mean(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    return [_Point(point.rows, _mean(run), point.weight) for run in runs for point in run]


def _mean(points: Sequence[_Point]) -> float:
    return sum(point.ms * point.weight for point in points) / sum(point.weight for point in points)


def measure_line(step: Callable[[int], float], most_rows: int) -> CostLine:
    """Measure the cost line of a service that has just loaded, by a few real steps of each size.

    Args:
        step: runs a step of so many rows; returns how long it took, milliseconds.
        most_rows: that a step can have; at least 1.
    """
    total_ms = first_ms = step(1)  # it compiles, or touches pages for the first time
    points = [_Point(1, first_ms, 1.0)] if first_ms > MEASURING_MS else []
    for rows in [rows for rows in MEASURED_ROWS[len(points) :] if rows <= most_rows]:
        longest_ms = max((point.ms for point in points), default=first_ms)
        may_repeat = total_ms + REPEATS * longest_ms <= MEASURING_MS
        may_time = total_ms <= 2 * MEASURING_MS and len(points) < LEAST_SIZES
        if not (may_repeat or may_time):
            break
        times = [step(rows) for _ in range(REPEATS if may_repeat else 1)]
        total_ms += sum(times)
        points.append(_Point(rows, median(times), 1.0))
    points.sort(key=lambda point: point.rows)
    return CostLine(tuple((point.rows, point.ms) for point in _rising(points)))
