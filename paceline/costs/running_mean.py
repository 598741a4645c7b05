"""A mean that starts from a prior and forgets. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98
"""Share of a mean that survives one more observation: it remembers about 50."""


@dataclass(slots=True)
class RunningMean:
    """A running mean that starts from a prior worth `weight` observations."""

    value: float
    weight: float
    limit: float = 1 / (1 - DECAY)
    """Observations that it remembers."""

    def add(self, observed: float) -> None:
        """Count one observation."""
        self.weight = min(self.weight + 1, self.limit)
        self.value += (observed - self.value) / self.weight
