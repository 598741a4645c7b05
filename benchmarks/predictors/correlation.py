"""Rank correlation, and how sure it is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 500
"""Of the bootstrap: the interval's ends move by less than .01 between seeds."""
CONFIDENCE = 0.95

Values = NDArray[np.float64]


@dataclass(frozen=True)
class RankAgreement:
    """Spearman's ρ with the percentile bootstrap's 95 % interval; nan: nothing to rank."""

    rho: float
    low: float
    high: float


def spearman(one: Values, other: Values) -> float:
    """Spearman's ρ, ties at their mean rank; nan where either is constant.

    Args:
        one: [n].
        other: [n].
    """
    if one.size < 2:
        return float("nan")
    spreads = [ranks - ranks.mean() for ranks in (mean_ranks(one), mean_ranks(other))]
    scale = float(np.sqrt((spreads[0] ** 2).sum() * (spreads[1] ** 2).sum()))
    return float((spreads[0] * spreads[1]).sum()) / scale if scale else float("nan")


def mean_ranks(values: Values) -> Values:
    """[n] from 1 on, ties at the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place])


def bootstrapped(
    statistic: Callable[[Sequence[int]], float], clusters: int, *, resamples: int | None = None, seed: int = 0
) -> RankAgreement:
    """A statistic of clusters (prompts), which are resampled whole: positions of one prompt are not independent.

    Args:
        statistic: of the numbers of the clusters that are in the sample, some more than once.
        clusters: how many there are.
        resamples: how many samples are drawn; None: `RESAMPLES`.
        seed: fixes the draws.
    """
    whole = statistic(range(clusters))
    random = np.random.default_rng(seed)
    drawn = [
        statistic(random.integers(0, clusters, clusters).tolist())
        for _ in range(RESAMPLES if resamples is None else resamples)
    ]
    kept = np.array([each for each in drawn if not np.isnan(each)])
    if not kept.size or np.isnan(whole):
        return RankAgreement(whole, float("nan"), float("nan"))
    tails = 50 * (1 - CONFIDENCE), 100 - 50 * (1 - CONFIDENCE)
    low, high = np.percentile(kept, tails)
    return RankAgreement(whole, float(low), float(high))
