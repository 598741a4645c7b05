"""A mean that starts from a prior and forgets. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 50.0
"""Observations that a mean remembers. The last 50 tokens of a text tell more of the next ones than all of it."""
PRIOR_WEIGHT = 4.0
"""A prior counts as many observations: that of matches and drafters in a pool, and that of a pool in a new request.
One copied passage, or a round or two of a draft, overrules it."""


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

    def child(self) -> RunningMean:
        """The mean that one request begins with: what it is so far counts as a prior."""
        return RunningMean(self.value, min(PRIOR_WEIGHT, self.weight))
