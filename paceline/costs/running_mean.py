"""A mean that starts from a prior and forgets. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98
"""Share of a mean that one more observation leaves. So a mean remembers about 50 observations."""


@dataclass(slots=True)
class RunningMean:
    """A running mean that starts from a prior worth `weight` observations."""

    value: float
    weight: float
    limit: float = 1 / (1 - DECAY)
    """Observations that it remembers."""

    def add(self, observation: float) -> None:
        """Count one observation."""
        self.weight = min(self.weight + 1, self.limit)
        self.value += (observation - self.value) / self.weight
