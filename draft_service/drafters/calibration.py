"""How often the target's token has a rank in the drafter's ranking, learned from commits.

It is a table of counts by rank, in bins of the best token's q. It starts from a prior that suits a middling
draft under shared noise (`exactness` §1a) and forgets slowly, so it follows the text. It has counts instead of
the running means of `paceline.costs`, since a commit updates one of 16 ranks, and the prior, which depends on q
itself and not on its bin, is never forgotten.
"""

from __future__ import annotations

from bisect import bisect_right

Q_EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
RANKS = 16
"""Ranks that have counts of their own; a token beyond them counts as not guessed."""
PRIOR_WEIGHT = 16.0
"""The prior of a bin counts as many observations."""
MEMORY = 4096.0
"""Observations of a bin after which its counts are halved."""


class Calibration:
    """P(the target's token has rank r | q of the ranking's best)."""

    def __init__(self) -> None:
        self._counts = [[0.0] * RANKS for _ in range(len(Q_EDGES) + 1)]
        self._totals = [0.0] * (len(Q_EDGES) + 1)

    def chance(self, best_q: float, rank: int) -> float:
        """Chance of rank 1, 2, …; positive."""
        place = bisect_right(Q_EDGES, best_q)
        count = self._counts[place][rank - 1] if rank <= RANKS else 0.0
        return (count + PRIOR_WEIGHT * prior_chance(best_q, rank)) / (self._totals[place] + PRIOR_WEIGHT)

    def average(self) -> float:
        """Chance of rank 1 over all q."""
        count, prior = sum(counts[0] for counts in self._counts), PRIOR_WEIGHT * prior_chance(0.5, 1)
        return (count + prior) / (sum(self._totals) + PRIOR_WEIGHT)

    def observe(self, best_q: float, rank: int | None) -> None:
        """Count the rank of the target's token; None: it was not among the guesses."""
        place = bisect_right(Q_EDGES, best_q)
        if rank is not None and rank <= RANKS:
            self._counts[place][rank - 1] += 1
        self._totals[place] += 1
        if self._totals[place] >= MEMORY:
            self._counts[place] = [count / 2 for count in self._counts[place]]
            self._totals[place] /= 2


def prior_chance(best_q: float, rank: int) -> float:
    """Chance of a rank before anything is learned. It rises with q for the best token, and halves with each rank."""
    first = 0.4 + 0.55 * best_q
    return first if rank == 1 else (1 - first) * 0.5 ** (rank - 1)
