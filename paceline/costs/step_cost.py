"""How long a step takes by its rows, as measured. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from paceline.costs.running_mean import DECAY, RunningMean

MAX_ROWS = 4096
_EDGES = tuple(sorted({*range(1, 9), *(2**n for n in range(4, 13)), *(3 * 2**n for n in range(2, 11))}))
PRIOR_ROW_SHARE = 0.03
"""Cost of one more row over that of the first, until it is measured."""
OUTLIER = 3.0
"""A step that takes longer than this many times what was expected counts as so many times."""
CERTAIN_AFTER = 8.0
"""Weight of steps below which the line takes rows to be free."""


@dataclass
class _Bucket:
    rows: RunningMean
    ms: RunningMean


class StepCost:
    """Milliseconds of a step by its rows, read in two ways.

    `ms` joins the means of buckets of rows by straight lines: what a step of any size takes.
    `per_row` and `fixed` are one straight line through the latest steps: what a row more adds to steps like
    those. It forgets with every step, a bucket only with those of its own size.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._points: list[tuple[float, float]] | None = []
        """(rows, ms), ascending in both; None: not made yet since the last step. Every length of a plan reads it."""
        self._weight = self._sum_rows = self._sum_ms = self._sum_rows_rows = self._sum_rows_ms = 0.0
        """Sums of the line's least squares; each step leaves `DECAY` of what was before."""

    def observe(self, rows: int, ms: float) -> None:
        """A step of so many rows took so long."""
        place = bisect_left(_EDGES, min(rows, MAX_ROWS))
        bucket = self._buckets.get(place)
        if bucket is None:
            self._buckets[place] = _Bucket(RunningMean(rows, 1), RunningMean(ms, 1))
        else:
            bucket.rows.add(rows)
            bucket.ms.add(min(ms, OUTLIER * bucket.ms.value))
        self._points = None
        self._weight = DECAY * self._weight + 1
        self._sum_rows = DECAY * self._sum_rows + rows
        self._sum_ms = DECAY * self._sum_ms + ms
        self._sum_rows_rows = DECAY * self._sum_rows_rows + rows * rows
        self._sum_rows_ms = DECAY * self._sum_rows_ms + rows * ms

    def ms(self, rows: float) -> float:
        """Expected milliseconds of a step of so many rows, never less than of fewer; 0 before the first step."""
        points = self._points
        if points is None:
            points = self._points = self._joined_means()
        if not points:
            return 0.0
        if len(points) == 1 or rows <= points[0][0]:
            at, ms = points[0]
            return max(0.0, ms * (1 + PRIOR_ROW_SHARE * (rows - at) / max(1.0, 1 + PRIOR_ROW_SHARE * at)))
        place = bisect_left(points, (rows,))
        if place < len(points):
            (low, low_ms), (high, high_ms) = points[place - 1], points[place]
            return low_ms + (high_ms - low_ms) * (rows - low) / (high - low)
        (low, low_ms), (high, high_ms) = points[-2:]
        slope = max((high_ms - low_ms) / (high - low), PRIOR_ROW_SHARE * points[0][1] / 4)
        return high_ms + slope * (rows - high)

    def beyond(self, rows: float, most: int) -> list[float]:
        """What n rows more add to a step of `rows`, for n = 0 to `most`; milliseconds."""
        base = self.ms(rows)
        return [self.ms(rows + n) - base for n in range(most + 1)]

    @property
    def per_row(self) -> float:
        """Milliseconds that a row adds; 0 until steps of different sizes have been seen."""
        spread = self._weight * self._sum_rows_rows - self._sum_rows * self._sum_rows
        if self._weight < CERTAIN_AFTER or spread < self._weight:
            return 0.0
        slope = (self._weight * self._sum_rows_ms - self._sum_rows * self._sum_ms) / spread
        return min(max(slope, 0.0), self._sum_ms / self._sum_rows)

    @property
    def fixed(self) -> float:
        """Milliseconds of a step without rows."""
        return (self._sum_ms - self.per_row * self._sum_rows) / self._weight if self._weight else 0.0

    def is_worth(self, chance: float, rows: int, gained: float) -> bool:
        """Whether one row more raises the chances gained per millisecond.

        The step has `rows` rows that gain `gained`; the next gains `chance`.
        """
        per_row = self.per_row
        return not rows or chance * (self.fixed + per_row * rows) >= gained * per_row

    def _joined_means(self) -> list[tuple[float, float]]:
        points: list[tuple[float, float]] = []
        for place in sorted(self._buckets):
            bucket = self._buckets[place]
            floor = points[-1][1] if points else 0.0
            points.append((bucket.rows.value, max(floor, bucket.ms.value)))
        return points
