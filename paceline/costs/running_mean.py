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


class InheritedMean:
    """A mean of one case among many: what all have shown counts as so many observations, and learns from it, too."""

    __slots__ = ("_own", "_parent", "_trust")

    def __init__(self, parent: AnyMean, trust: float) -> None:
        self._parent, self._trust = parent, trust
        self._own = RunningMean(0.0, 0.0)

    @property
    def value(self) -> float:
        """Between its own and its parent's, as that is now."""
        own, trust = self._own, self._trust
        return (trust * self._parent.value + own.weight * own.value) / (trust + own.weight)

    def add(self, observed: float) -> None:
        """Count one observation, here and at the parent."""
        self._parent.add(observed)
        self._own.add(observed)


AnyMean = RunningMean | InheritedMean
