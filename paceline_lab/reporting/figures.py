"""The arithmetic of reports: medians with spread, bootstrap bounds, the ceiling. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def median_with_lower_bound(values: Sequence[float]) -> tuple[float, float]:
    """Median, and its one-sided 95 % lower bound by bootstrap."""
    return Spread.of(values).median, lower_bound(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours; 0 of nothing."""
    return float(np.percentile(values, percent)) if values else 0.0


def lower_bound(
    values: Sequence[float],
    *,
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]] = lambda drawn: np.median(drawn, axis=-1),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> float:
    """One-sided 95 % lower bound of a statistic by the percentile bootstrap; 0 of nothing.

    Args:
        values: one figure a pair; pairs are resampled whole, so what disturbs both sides of a pair cancels.
        statistic: [resamples, values] → [resamples].
        resamples: how many samples are drawn.
        seed: fixes the draw, so that a report can be computed again from its JSON.
    """
    if not values:
        return 0.0
    given = np.asarray(values, np.float64)
    drawn = given[np.random.default_rng(seed).integers(0, given.size, (resamples, given.size))]
    return float(np.percentile(statistic(drawn), 100 * (1 - CONFIDENCE)))


def ceiling(tokens_per_round: float, single_row_ms: float, round_ms: float) -> float:
    """Speed-up with coordination and drafting at no cost: E[tokens] · t(1) / t(k + 1); 0 where unknown.

    Args:
        tokens_per_round: committed tokens ÷ rounds.
        single_row_ms: t(1), target-only's own step.
        round_ms: t(k + 1), the mean over rounds where they differ in rows.
    """
    return tokens_per_round * single_row_ms / round_ms if round_ms > 0 else 0.0


@dataclass(frozen=True)
class RowCosts:
    """Median time of a target step by its rows, in ms, as measured in verdicts."""

    median_ms: Mapping[int, float]
    samples: Mapping[int, int]

    @classmethod
    def of(cls, steps: Sequence[tuple[int, float]]) -> RowCosts:
        """Fold (rows, ms) pairs."""
        by_rows: dict[int, list[float]] = {}
        for rows, taken_ms in steps:
            by_rows.setdefault(rows, []).append(taken_ms)
        ordered = sorted(by_rows.items())
        return cls({rows: float(np.median(taken)) for rows, taken in ordered}, {rows: len(t) for rows, t in ordered})

    def at(self, rows: int) -> float:
        """t(rows); between measured rows linear, outside them the nearest; 0 where nothing was measured."""
        if not self.median_ms:
            return 0.0
        return float(np.interp(rows, list(self.median_ms), list(self.median_ms.values())))

    def covers(self, rows: Sequence[int]) -> bool:
        """Whether rows lie within what was measured, so that `at` extrapolates none of them."""
        return bool(self.median_ms) and all(min(self.median_ms) <= one <= max(self.median_ms) for one in rows)

    def mean(self, rows: Sequence[int]) -> float:
        """Mean of t over the rows of many rounds; 0 of none."""
        return float(np.mean([self.at(one) for one in rows])) if rows else 0.0
