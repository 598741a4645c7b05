"""The arithmetic of reports: medians with spread, bootstrap bounds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Median and extremes of one figure; all 0 where nothing was measured."""

    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Fold values."""
        if not values:
            return cls()
        return cls(float(np.median(values)), min(values), max(values), len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, linear between neighbours; 0 without values."""
    return float(np.percentile(values, percent)) if values else 0.0


def lower_bound(values: Sequence[float]) -> float:
    """Return the one-sided 95 % lower bound of the median by the percentile bootstrap; 0 without values.

    A value is one figure of a pair; pairs are resampled whole, so what disturbs both sides of a pair cancels. The
    samples are the same each time, so that a report can be computed again from its JSON.
    """
    if not values:
        return 0.0
    figures = np.asarray(values, np.float64)
    samples = figures[np.random.default_rng(0).integers(0, figures.size, (RESAMPLES, figures.size))]
    return float(np.percentile(np.median(samples, axis=-1), 100 * (1 - CONFIDENCE)))
