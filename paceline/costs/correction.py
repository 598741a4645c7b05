"""The correction of a line by what steps took: one rule for services and coordinators. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.costs.running_mean import RunningMean

SPEED_MEMORY = 16.0
"""Steps or rounds that a machine's speed remembers. They are fewer than a request's rounds, since the speed of a
shared machine changes within one request."""
OUTLIER = 4.0
"""A time counts at most as this many times the expected one, so that a machine's pauses have little weight. A round
that just misses a step takes twice as long, which must count: half of 4 loses goodput (`2026-11-23-one-planner`)."""


def _no_change() -> RunningMean:
    return RunningMean(1.0, 1.0, limit=SPEED_MEMORY)


@dataclass(slots=True)
class Correction:
    """The mean ratio of measured times to expected ones.

    Attributes:
        mean: of the ratios.
        most: a ratio counts at most as this many times the mean.
    """

    mean: RunningMean = field(default_factory=_no_change)
    most: float = OUTLIER

    @property
    def value(self) -> float:
        """The factor that corrects an expected time."""
        return self.mean.value

    def learn(self, ms: float, expected_ms: float) -> None:
        """Learn from a time; one that was expected to take nothing says nothing."""
        if expected_ms > 0:
            self.mean.add(min(ms / expected_ms, self.most * self.mean.value))
