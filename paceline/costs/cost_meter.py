"""Measures the line of a service's steps, at load and from then on with every step that runs. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from paceline.costs.cost_line import LEAST_STEP_MS, CostLine
from paceline.costs.running_mean import RunningMean
from paceline.costs.service_costs import MOVED, UNKNOWN

_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 4096)
"""Largest rows of each bucket, so a line has at most 16 points: steps within a bucket differ by a half at most, up to
64 rows, which is where decode steps are."""
OUTLIER = 3.0
"""A step that takes longer than this many times what was expected of its size counts as so many times."""
SIZE_STEPS = 200.0
"""Steps of its size that a factor remembers. A change of speed that takes `SPEED_STEPS` to be known leaves 8 % of
itself with the size that ran meanwhile."""
SURGE = 1.5
"""As much as a machine that others share slows down for good: what a step counts for at most as to its speed. So a
pause moves a line by 4 %."""
SPEED_STEPS = 16.0
"""Steps by which a machine's speed is known, whatever their rows: fewer than a request's rounds, since machines that
others share change within one."""
MEASURED_ROWS = (1, 8, 2, 4, 16, 32, 64)
"""Rows of the steps that are timed at load, in this order: first what a bare line needs."""
LEAST_SIZES = 2
"""Of those so many are timed once where there is no time for more: without a slope nothing can be planned."""
REPEATS = 3
"""The median of three bears one step that was interrupted."""
MEASURING_MS = 1000.0
"""Time for measuring three times, and half the time after which not even a single step begins. Loading a model whose
steps are long takes many times as long."""


@dataclass
class _StepsOfSize:
    rows: RunningMean
    factor: RunningMean
    """Of the steps' times to what the base says."""


@dataclass
class _Point:
    rows: float
    ms: float
    weight: float


class CostMeter:
    """Learns by which factors steps differ from a base line: one factor of all, and one of each size.

    That of all forgets quickly: it is the machine's speed, which changes for steps of every size at once. Else sizes
    that run now and then would keep the times of a moment when it was another, and rows would look dear, or free.
    Rows that no step has had follow the nearest that have been seen, so that contexts that have grown since, or a
    draft that works beside, move the whole line.
    """

    def __init__(self, base: CostLine = UNKNOWN) -> None:
        self.base = base
        """May be replaced: the factors go on from there."""
        self.line = base
        """Renewed when a step shows that a point has moved by more than `MOVED`."""
        self._buckets: dict[int, _StepsOfSize] = {}
        self._speed = RunningMean(1.0, 1.0, limit=SPEED_STEPS)
        """Of all steps: their times to what the line without it says."""

    @property
    def is_measured(self) -> bool:
        """Whether a step has been observed."""
        return bool(self._buckets)

    def observe(self, rows: int, ms: float) -> None:
        """A step of so many rows took so long."""
        ms = max(ms, LEAST_STEP_MS)
        if not self.base.is_known:
            self.base = CostLine(((rows, ms),))
        place = bisect_left(_EDGES, min(rows, _EDGES[-1]))
        expected = self._factor(rows)
        bucket = self._buckets.setdefault(
            place, _StepsOfSize(RunningMean(rows, 0), RunningMean(expected, 1, SIZE_STEPS))
        )
        bucket.rows.add(min(rows, _EDGES[-1]))
        took, speed, factor = ms / self.base.ms(rows), self._speed, bucket.factor
        speed.add(min(took / factor.value, SURGE * speed.value))
        factor.add(min(took / speed.value, OUTLIER * factor.value))
        at = bucket.rows.value
        now, said = self.base.ms(at) * factor.value * speed.value, self.line.ms(at)
        if abs(now - said) > MOVED * said:
            self.line = CostLine(
                tuple((point.rows, max(point.ms, LEAST_STEP_MS)) for point in _rising(self._points()))
            )

    def _points(self) -> list[_Point]:
        """Of each bucket the mean of its steps or, where there was none, the base's point there."""
        made = dict[int, _Point]()
        for place, bucket in self._buckets.items():
            rows, factor = bucket.rows.value, bucket.factor
            made[place] = _Point(rows, self.base.ms(rows) * factor.value * self._speed.value, factor.weight)
        for rows, ms in self.base.points:
            expected = ms * self._factor(rows) * self._speed.value
            made.setdefault(bisect_left(_EDGES, rows), _Point(rows, expected, 1.0))
        return [made[place] for place in sorted(made)]

    def _factor(self, rows: float) -> float:
        """Between the buckets that have been seen, straight; beyond them the nearest one's."""
        seen = sorted((bucket.rows.value, bucket.factor.value) for bucket in self._buckets.values())
        if not seen:
            return 1.0
        for (low, low_factor), (high, high_factor) in pairwise(seen):
            if low <= rows <= high:
                return low_factor + (high_factor - low_factor) * (rows - low) / (high - low)
        return seen[0][1] if rows < seen[0][0] else seen[-1][1]


def _rising(points: Sequence[_Point]) -> list[_Point]:
    """Times that never fall, as near to the given ones as their weights say: falling neighbours share their mean."""
    runs: list[list[_Point]] = []
    for point in points:
        runs.append([point])
        while len(runs) > 1 and _mean(runs[-2]) > _mean(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    return [_Point(point.rows, _mean(run), point.weight) for run in runs for point in run]


def _mean(points: Sequence[_Point]) -> float:
    return sum(point.ms * point.weight for point in points) / sum(point.weight for point in points)


def measured(step: Callable[[int], float], most_rows: int) -> CostLine:
    """The line of a service that has just loaded: a few real steps, each size the median of three where time allows.

    Args:
        step: runs a step of so many rows; returns how long it took, milliseconds.
        most_rows: that a step can have; at least 1.
    """
    spent = first = step(1)  # it compiles, or touches pages for the first time
    points = [_Point(1, first, 1.0)] if first > MEASURING_MS else []
    for rows in [rows for rows in MEASURED_ROWS[len(points) :] if rows <= most_rows]:
        expected = max((point.ms for point in points), default=first)
        thrice = spent + REPEATS * expected <= MEASURING_MS
        once = spent <= 2 * MEASURING_MS and len(points) < LEAST_SIZES
        if not (thrice or once):
            break
        times = [step(rows) for _ in range(REPEATS if thrice else 1)]
        spent += sum(times)
        points.append(_Point(rows, median(times), 1.0))
    points.sort(key=lambda point: point.rows)
    return CostLine(tuple((point.rows, point.ms) for point in _rising(points)))
