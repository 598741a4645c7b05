"""How often proposed tokens are, or would have been, the target's: one table for planner and draft service. Pure.

A drafter reports the rank of each committed token in its own order: the token's shadow. Under coupled acceptance a
token of rank 1 would have been accepted if all before it were. So the ranks tell what a proposal of any length would
have brought, whether anything was proposed or not (`exactness` §7, replay). Rejection and block acceptance learn
averages by depth only, never from a token that was dropped.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from paceline.costs.running_mean import PRIOR_WEIGHT, RunningMean
from paceline.protocol.proposal import ROOT, Proposal

MAX_DEPTH = 16
"""Longest path that a model is asked for, and the number of depths with statistics of their own."""
FAN_OUT = 4
"""Next tokens of each node that outcomes are drafted for, unless a setting says otherwise."""
MAX_RANK = 1 + FAN_OUT
"""The number of ranks with statistics of their own: of what is drafted for behind a node, its child is left out."""
BINS = 10
"""Equal bins of a probability or score, each with a mean of its own."""
HALF = 0.5
"""A middling draft's chances halve with each rank."""
UNSURE, SUREST = 0.4, 1 - HALF / BINS
"""Acceptance of a first choice before anything is learned, by its q: at 0, and at 1, the last bin's middle."""


def prior_chance(q: float, rank: int = 1) -> float:
    """Chance of a rank before anything is learned, by the first choice's q; it halves with each rank behind it."""
    first = UNSURE + (SUREST - UNSURE) * q  # under shared noise a token of small q is often right (`exactness` §1a)
    return first if rank == 1 else (1 - first) * HALF ** (rank - 1)


PRIOR_CHANCE = prior_chance(HALF)
"""Acceptance before anything is known, not even a q: one that isn't tried stays unknown, and the loss budget bounds
the cost. The real pair's k = 4 accepts .47 to .84 a token (docs/reports/spec-bench-pair-2026-11-24.md)."""


def binned_chances(prior: Callable[[float], float]) -> list[RunningMean]:
    """Chances by a feature in [0, 1], such as a probability, that begin at `prior(feature)`, at each bin's least."""
    return [RunningMean(prior(place / BINS)) for place in range(BINS)]


def bin_of(feature: float) -> int:
    """The place of a feature among binned chances."""
    return min(int(feature * BINS), BINS - 1)


@dataclass
class TokenAcceptance:
    """How often one drafter's tokens are, or would have been, accepted.

    Attributes:
        by_depth: chance of the first choice at depth 1, 2, …, given that all above it are accepted.
        by_rank: chance of the second choice, third, …, given that none before it is the target's.
        by_q: chance of the first choice by its probability; coupled acceptance only.
        positions: the number of positions whose ranks or averages have come.
    """

    by_depth: list[RunningMean] = field(default_factory=lambda: [RunningMean(PRIOR_CHANCE) for _ in range(MAX_DEPTH)])
    by_rank: list[RunningMean] = field(default_factory=lambda: [RunningMean(HALF) for _ in range(MAX_RANK - 1)])
    by_q: list[RunningMean] = field(default_factory=lambda: binned_chances(prior_chance))
    positions: int = 0

    def child(self) -> TokenAcceptance:
        """The table that one request begins with."""
        depths, ranks, bins = ([mean.child() for mean in row] for row in (self.by_depth, self.by_rank, self.by_q))
        return TokenAcceptance(depths, ranks, bins)

    def upper_bound(self, positions: int) -> TokenAcceptance:
        """The table at its upper bound, which approaches the mean the more `positions` any request has tried it at.

        What is untried is judged halfway from its prior to perfect, or a dear drafter would never be tried
        (docs/decisions/2026-11-23-which-drafter-is-found-out.md: 1.6 × where the untried one brings 3.2 ×).
        """
        share = PRIOR_WEIGHT / (2 * PRIOR_WEIGHT + positions)
        return replace(self, by_depth=[RunningMean(mean.value + share * (1 - mean.value)) for mean in self.by_depth])

    def take_rank(self, rank: int, q: float, run: int = 0) -> None:
        """Count the rank of a committed token, 0: it is not among the ranked ones, and the first choice's q.

        It counts at the depth behind each of the `run` positions right before it, whose tokens were all first
        choices, as if a proposal had begun there.
        """
        first = rank == 1
        self.positions += 1
        for mean in self.by_depth[: run + 1]:
            mean.add(float(first))
        self.by_q[bin_of(q)].add(float(first))
        for place, mean in enumerate(self.by_rank[: rank - 1] if rank else self.by_rank, 2):
            mean.add(float(rank == place))

    def take_average(self, chance: float) -> None:
        """Count a chance of acceptance at every depth, where there are no ranks."""
        self.positions += 1
        for mean in self.by_depth:
            mean.add(chance)

    def take_proposal(self, proposal: Proposal, path: Sequence[int], first: int = 0) -> None:
        """Count a proposal's accepted path by depth, from depth `first` on; the shadow tells depths before it."""
        for depth in range(first, min(max(proposal.depths), len(path) + 1, MAX_DEPTH)):
            self.by_depth[depth].add(float(depth < len(path)))

    def reach(self, most: int) -> list[float]:
        """Chance that the first 1, 2, … `most` tokens of a chain are all accepted."""
        return [*accumulate((mean.value for mean in self.by_depth[:most]), operator.mul)]

    def chance(self, q: float, rank: int) -> float:
        """Chance of a rank behind an accepted node, by the first choice's q."""
        return self._of_rank(self.by_q[bin_of(q)].value, rank)

    def node_chances(self, proposal: Proposal, *, by_q: bool) -> list[float]:
        """Chance of each node of a proposal; `by_q`: its own probability may be used."""
        chances: list[float] = []
        ranks: Counter[int] = Counter()
        for node, (parent, depth) in enumerate(zip(proposal.parents, proposal.depths, strict=True)):
            ranks[parent] += 1
            first = self.by_depth[min(depth, MAX_DEPTH) - 1].value
            if by_q and ranks[parent] == 1:
                first = self.by_q[bin_of(proposal.draft_probabilities[node])].value
            chances.append((1.0 if parent == ROOT else chances[parent]) * self._of_rank(first, ranks[parent]))
        return chances

    def _of_rank(self, first: float, rank: int) -> float:
        """Chance of a rank, given that of the first; ranks without statistics of their own have the last one's."""
        if rank == 1:
            return first
        others = [self.by_rank[min(place, MAX_RANK) - 2].value for place in range(2, rank + 1)]
        return (1 - first) * math.prod(1 - other for other in others[:-1]) * others[-1]
