"""Measured acceptance rates of proposed tokens, by a feature of the token. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.costs.running_mean import RunningMean


@dataclass(frozen=True, slots=True)
class AcceptanceRates:
    """Chance that a proposed token is accepted, by a feature of it: a running mean for each bin.

    `edges` cut the feature into bins; bin i holds features in [edges[i - 1], edges[i]).
    """

    edges: tuple[float, ...]
    means: tuple[RunningMean, ...]

    @classmethod
    def of(cls, edges: Sequence[float], prior: Callable[[float], float], weight: float) -> AcceptanceRates:
        """Rates that begin in each bin with `prior(feature)`, worth `weight` observations."""
        lows = (0.0, *edges)
        return cls(tuple(edges), tuple(RunningMean(prior(low), weight) for low in lows))

    def chance(self, feature: float) -> float:
        """Chance of acceptance at this feature."""
        return self.means[bisect_right(self.edges, feature)].value

    def add(self, feature: float, accepted: bool) -> None:
        """Count whether one token with this feature was accepted."""
        self.means[bisect_right(self.edges, feature)].add(float(accepted))

    def child(self, weight: float) -> AcceptanceRates:
        """A copy that one request learns on from; its past counts at most `weight` observations in each bin."""
        means = (RunningMean(mean.value, min(weight, mean.weight)) for mean in self.means)
        return AcceptanceRates(self.edges, tuple(means))
