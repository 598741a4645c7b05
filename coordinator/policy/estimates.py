"""What the policy knows, all of it measured: running means that forget. Pure.

Shared by all requests of a coordinator, so that a new request starts from what
the last ones learned.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DECAY = 0.98
"""Share of a mean that survives one more observation: it remembers about 50."""


@dataclass
class Mean:
    """A running mean that starts from a prior worth `weight` observations."""

    value: float
    weight: float
    limit: float = 1 / (1 - DECAY)
    """Observations that it remembers."""

    def add(self, observed: float) -> None:
        """Count one observation."""
        self.weight = min(self.weight + 1, self.limit)
        self.value += (observed - self.value) / self.weight


MAX_ROWS = 4096
_EDGES = tuple(sorted({*range(1, 9), *(2**n for n in range(4, 13)), *(3 * 2**n for n in range(2, 11))}))
PRIOR_ROW_SHARE = 0.03
"""Cost of one more row over that of the first, until it is measured."""
OUTLIER = 3.0
"""A step that takes longer than this many times what was expected counts as so many times."""


@dataclass
class _Bucket:
    rows: Mean
    ms: Mean


class StepCostTable:
    """Milliseconds of a step by its rows: means in buckets of rows, straight lines between them."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._points: list[tuple[float, float]] = []
        """(rows, ms), ascending in both. Read for every length of a plan, so it is kept until a step is added."""

    def add(self, rows: int, ms: float) -> None:
        """Count one step."""
        place = bisect_left(_EDGES, min(rows, MAX_ROWS))
        bucket = self._buckets.get(place)
        if bucket is None:
            self._buckets[place] = _Bucket(Mean(rows, 1), Mean(ms, 1))
        else:
            bucket.rows.add(rows)
            bucket.ms.add(min(ms, OUTLIER * bucket.ms.value))
        self._points = self._line()

    def ms(self, rows: float) -> float:
        """Expected milliseconds of a step of so many rows, never less than of fewer; 0 before the first step."""
        points = self._points
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

    def _line(self) -> list[tuple[float, float]]:
        points: list[tuple[float, float]] = []
        for place in sorted(self._buckets):
            bucket = self._buckets[place]
            floor = points[-1][1] if points else 0.0
            points.append((bucket.rows.value, max(floor, bucket.ms.value)))
        return points


@dataclass(frozen=True)
class Confidence:
    """Chance that a proposed token is accepted, by what was known of it, learned from what became of others.

    `edges` cut the feature into bins; bin i holds features in [edges[i - 1], edges[i]).
    """

    edges: tuple[float, ...]
    means: tuple[Mean, ...]

    @classmethod
    def of(cls, edges: Sequence[float], prior: Callable[[float], float], weight: float) -> Confidence:
        """Begin with `prior(feature)`, worth `weight` observations, in each bin."""
        lows = (0.0, *edges)
        return cls(tuple(edges), tuple(Mean(prior(low), weight) for low in lows))

    def chance(self, feature: float) -> float:
        """Chance of acceptance at this feature."""
        return self.means[self._bin(feature)].value

    def add(self, feature: float, accepted: bool) -> None:
        """Count what became of one token."""
        self.means[self._bin(feature)].add(float(accepted))

    def child(self, weight: float) -> Confidence:
        """A copy for one request, which learns on from here; what is known so far counts `weight` observations."""
        return Confidence(self.edges, tuple(Mean(mean.value, min(weight, mean.weight)) for mean in self.means))

    def _bin(self, feature: float) -> int:
        return bisect_right(self.edges, feature)
