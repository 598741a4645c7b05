"""The cost line of a service: what its steps take by their rows, as points joined by straight lines. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from paceline.protocol.errors import InvalidInput, require

MAX_POINTS = 64
MAX_COST_ROWS = 1 << 20
LEAST_STEP_MS = 1e-6
"""Shortest step that a line may state: planners divide by a step's time."""


@dataclass(frozen=True)
class CostLine:
    """Milliseconds of a step by its rows. Without points nothing is known: every step takes 0.

    Attributes:
        points: (rows, ms), both rising, from `LEAST_STEP_MS` on; at most `MAX_POINTS`.

    Raises:
        InvalidInput: rows that don't rise, times that fall, or numbers out of bounds.
    """

    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        require(len(self.points) <= MAX_POINTS, "cost line points", len(self.points), f"at most {MAX_POINTS}")
        last_rows, last_ms = 0.0, LEAST_STEP_MS
        for rows, ms in self.points:
            rises = last_rows < rows <= MAX_COST_ROWS and last_ms <= ms < float("inf")
            require(rises, "cost line point", (rows, ms), f"rows above {last_rows:g}, ms of at least {last_ms:g}")
            last_rows, last_ms = rows, ms

    @classmethod
    def parse(cls, field: str, text: str) -> CostLine:
        """Read `ROWS:MS,…`, such as `1:20,16:24`.

        Raises:
            InvalidInput: not of that form; it names the field.
        """
        try:
            pairs = [part.split(":") for part in text.split(",") if part.strip()]
            return cls(tuple((float(rows), float(ms)) for rows, ms in pairs))
        except ValueError as error:
            raise InvalidInput.of(field, text, "ROWS:MS with commas between") from error

    @classmethod
    def rising(cls, points: Iterable[tuple[float, float, float]]) -> CostLine:
        """The line of points (rows, ms, weight); neighbours that fall share their weighted mean (isotonic)."""
        runs: list[tuple[list[float], float, float]] = []
        for rows, ms, weight in points:
            run = [rows], ms, weight
            while runs and runs[-1][1] > run[1]:
                before_rows, before_ms, before_weight = runs.pop()
                total = before_weight + run[2]
                run = [*before_rows, *run[0]], (before_ms * before_weight + run[1] * run[2]) / total, total
            runs.append(run)
        return cls(tuple((rows, max(ms, LEAST_STEP_MS)) for run, ms, _ in runs for rows in run))

    @property
    def is_known(self) -> bool:
        """Whether anything has been measured."""
        return bool(self.points)

    def ms(self, rows: float) -> float:
        """Milliseconds of a step of `rows`.

        The last segment is continued beyond the points. Below the first point a step takes the first point's time.
        """
        first, first_ms, more_ms, more = self._pieces[bisect_left(self._ends, rows)]
        return first_ms + more_ms * (rows - first) / more

    @cached_property
    def _ends(self) -> tuple[float, ...]:
        """Rows of the points. They are cached, since planners ask for tens of thousands of times a second."""
        return tuple(rows for rows, _ in self.points)

    @cached_property
    def _pieces(self) -> tuple[tuple[float, float, float, float], ...]:
        """Each segment's first rows, its first ms, its span in ms and its span in rows.

        Segment i holds the rows that are above i points.
        """
        points = self.points
        if not points:
            return ((0.0, 0.0, 0.0, 1.0),)
        level = (0.0, points[0][1], 0.0, 1.0)
        inner = [(low, ms, more_ms - ms, high - low) for (low, ms), (high, more_ms) in itertools.pairwise(points)]
        return (level, *inner, inner[-1] if inner else level)

    def added_ms(self, rows: float, most: int) -> tuple[tuple[float, ...], float]:
        """Milliseconds that 0, 1, … `most` rows add to a step of `rows`, and the least that any one of them adds.

        They are kept, since each plan asks anew.
        """
        if (added := self._added_ms.get((rows, most))) is None:
            times = [self.ms(rows + more) for more in range(most + 1)]
            least_ms = min(more_ms - ms for ms, more_ms in itertools.pairwise(times))
            added = self._added_ms[rows, most] = tuple(ms - times[0] for ms in times), least_ms
        return added

    @cached_property
    def _added_ms(self) -> dict[tuple[float, int], tuple[tuple[float, ...], float]]:
        return {}

    def per_row(self, rows: float, more: float = 1.0) -> float:
        """Milliseconds that each of `more` rows adds to a step of `rows`."""
        return (self.ms(rows + more) - self.ms(rows)) / more

    def scale(self, factor: float) -> CostLine:
        """A line whose times are multiplied by `factor`, and are at least `LEAST_STEP_MS`."""
        return CostLine(tuple((rows, max(ms * factor, LEAST_STEP_MS)) for rows, ms in self.points))
