"""Figures of two distributions at a position: a draft's ranks under shared noise, overlap, KL, entropy. Pure.

Under coupled acceptance each id j has one exponential E_j. The target draws the id of least E_j / p_j, the draft
ranks ids by E_j / q_j (docs/exactness.md §1a). Given that the target drew x, m = E_x / p_x is Exp(1), and
E_j = p_j m + an Exp(1) of its own for every other j, since exponentials have no memory. So j stands before x in the
draft's order with probability 1 - exp(-m c_j), c_j = max(0, q_j p_x / q_x - p_j), independently of the others: the
rank of x is one more than a sum of independent coins, averaged over m. For rank 1 that gives 1 / (1 + Σ c_j), which
is `paceline_training.evaluate.coupled_acceptance`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RANKS = 8
"""Ranks that are distinguished: as many as a node of a dynamic tree may have children."""
LEAST_Q = 1e-9
"""KL counts an id that the draft excludes as having this probability; without a bound one such id hides the rest."""
_SINGLE_IDS = 64
"""Ids whose coins are followed one by one; the sum of the others' coins counts as a Poisson number."""
_LOG_STEP = 0.5
_LOG_M = np.arange(-20, 4.1, _LOG_STEP)
"""m on a logarithmic grid: the trapezoid rule converges as exp(-π² / step), below 1e-8, for any Σ c up to 1e8."""
_M = np.exp(_LOG_M)  # [nodes]
_WEIGHTS = _LOG_STEP * _M * np.exp(-_M)  # [nodes], of the density of m

Chances = NDArray[np.float64]
"""[V], sums to 1."""


def rank_reach(p: Chances, q: Chances, token: int) -> NDArray[np.float64]:
    """Return P(the draft's first r choices hold `token` | the target drew it) under shared noise, [RANKS]."""
    reach = np.zeros(RANKS)
    if p[token] <= 0 or q[token] <= 0:
        return reach
    rates = q * (p[token] / q[token]) - p  # [V]
    rates = rates[rates > 0]
    if rates.size > _SINGLE_IDS:
        rates = np.partition(rates, rates.size - _SINGLE_IDS)
    single_rates, rest = rates[-_SINGLE_IDS:], float(rates[:-_SINGLE_IDS].sum())
    before = _poisson(_M * rest)  # [nodes, RANKS] chance of so many ids before the token
    for rate in single_rates:
        absent = np.exp(-_M * rate)[:, None]
        before = before * absent + _shift(before) * (1 - absent)
    reach[:] = np.minimum(1.0, np.cumsum(_WEIGHTS @ before))
    reach[0] = 1 / (1 + rates.sum())
    return np.maximum.accumulate(reach)


def _poisson(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Poisson distribution of each mean: [nodes] → [nodes, RANKS]."""
    counts = np.arange(RANKS)
    factorials = np.cumprod(np.maximum(1, counts))
    return np.asarray(np.exp(-means)[:, None] * means[:, None] ** counts / factorials)


def _shift(before: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the chances with one more id before the token."""
    after = np.zeros_like(before)
    after[:, 1:] = before[:, :-1]
    return after


def divergence(p: Chances, q: Chances) -> float:
    """Return KL(p ‖ q) in nats, with q bounded below by `LEAST_Q`."""
    support = p > 0
    return float((p[support] * (np.log(p[support]) - np.log(np.maximum(q[support], LEAST_Q)))).sum())


def entropy(p: Chances) -> float:
    """Return the entropy in nats."""
    positive = p[p > 0]
    return float(-(positive * np.log(positive)).sum())


def calibration_error(confidence: NDArray[np.float64], right: NDArray[np.float64], bins: int = 10) -> float:
    """Return the expected calibration error, Σ share of a bin · |right - confidence|.

    Source: Guo et al., arXiv 1706.04599, eq. 3.

    Args:
        confidence: [n] in [0, 1].
        right: [n], 0 or 1, or the probability of being right.
        bins: number of bins, which have equal widths.
    """
    if not confidence.size:
        return 0.0
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(place, right - confidence, bins)
    return float(np.abs(gaps).sum() / confidence.size)
