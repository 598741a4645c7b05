"""Means that start from a prior and forget, of observations and of measured times over expected ones. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 50.0
"""Observations that a mean remembers. The last 50 tokens of a text tell more of the next ones than all of it."""
PRIOR_WEIGHT = 4.0
"""A prior counts as many observations: that of matches and drafters in a pool, and that of a pool in a new request.
One copied passage, or a round or two of a draft, overrules it."""
SPEED_MEMORY = 16.0
"""Steps or rounds that a machine's speed remembers: fewer than a request's, in which a shared machine's changes."""
OUTLIER = 4.0
"""A time counts at most as this many times the expected one, so that a machine's pauses have little weight. A round
that just misses a step takes twice as long, which must count: half of 4 loses goodput (`2026-11-23-one-planner`)."""


@dataclass(slots=True)
class RunningMean:
    """A running mean that starts from a prior worth `weight` observations, and remembers `limit` of them."""

    value: float
    weight: float = PRIOR_WEIGHT
    limit: float = MEMORY

    def add(self, observation: float) -> None:
        """Count one observation."""
        self.weight = min(self.weight + 1, self.limit)
        self.value += (observation - self.value) / self.weight

    def add_ratio(self, ms: float, expected_ms: float, most: float = OUTLIER) -> None:
        """Count a time over the expected one, at most as `most` times the mean; nothing where none was expected."""
        if expected_ms > 0:
            self.add(min(ms / expected_ms, most * self.value))

    def child(self) -> RunningMean:
        """The mean that one request begins with: what it is so far counts as a prior."""
        return RunningMean(self.value, min(PRIOR_WEIGHT, self.weight))


def speed() -> RunningMean:
    """The factor by which a machine's times differ from expected ones; one rule for services and coordinators."""
    return RunningMean(1.0, 1.0, SPEED_MEMORY)
