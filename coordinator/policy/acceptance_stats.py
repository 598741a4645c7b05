"""Acceptance statistics of a drafter, learned from every committed position. Pure.

A drafter reports the rank of each committed token in its own order: the token's shadow. Under coupled acceptance a
token of rank 1 would have been accepted if all before it were. So the ranks tell what a proposal of any length would
have brought, whether anything was proposed or not (`exactness` §7, replay). Rejection and block acceptance learn
averages by depth only, never from a token that was dropped.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from coordinator.policy.ngram_shadow import PRIOR_WEIGHT, NgramShadow
from coordinator.policy.plan import Source
from coordinator.policy.round_times import OUTLIER
from paceline.costs.acceptance import AcceptanceRates
from paceline.costs.running_mean import RunningMean
from paceline.protocol.proposal import ROOT, Proposal
from paceline.protocol.records import RoundRecord

MAX_DEPTH = 16
"""Longest path that a model is asked for, and the number of depths with statistics of their own."""
MAX_RANK = 5
"""The number of ranks with statistics of their own."""
PRIOR_CHANCE = 0.7
"""Acceptance before anything is known: drafts are made to be accepted, and one that isn't tried stays unknown. On
Spec-Bench the real pair's k = 4 accepts .8 to 2.7 tokens a round, chances of .47 to .84 a token
(docs/reports/spec-bench-pair-2026-11-24.md). The loss budget bounds the cost of trying."""
OPTIMISM_WEIGHT = PRIOR_WEIGHT
"""Observations that hope counts as right: what is untried is then judged halfway from its prior to perfect (.85). A
dear drafter at its prior may look no better than what is known of a cheap one, and would never be tried
(docs/decisions/2026-11-23-which-drafter-is-found-out.md: 1.6 × where the untried one brings 3.2 ×)."""
Q_EDGES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)
"""Bins of the probability that a drafter gives to its first choice."""


def _by_depth() -> list[RunningMean]:
    return [RunningMean(PRIOR_CHANCE, PRIOR_WEIGHT) for _ in range(MAX_DEPTH)]


def _by_rank() -> list[RunningMean]:
    # Behind the first choice chances halve by rank, as a middling draft's do.
    return [RunningMean(0.5, PRIOR_WEIGHT) for _ in range(2, MAX_RANK + 1)]


def _by_q() -> AcceptanceRates:
    # Under shared noise even a token of small q often is the target's (`exactness` §1a), and the surest is believed
    # as far as the surest match. A guess between these ends: four tokens of a bin weigh as much.
    return AcceptanceRates.of(Q_EDGES, lambda q: 0.3 + 0.65 * q, PRIOR_WEIGHT)


@dataclass
class CopyStats:
    """Means over rounds whose proposal was copied from a match: tokens proposed and committed, and milliseconds."""

    proposed: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    tokens: RunningMean = field(default_factory=lambda: RunningMean(1.0, 0.0))
    ms: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))

    def take(self, record: RoundRecord) -> None:
        """Count a round; a pause of the machine counts as an outlier."""
        self.proposed.add(record.proposed)
        self.tokens.add(record.accepted + 1)
        self.ms.add(min(record.round_ms, OUTLIER * self.ms.value) if self.ms.weight else record.round_ms)

    def child(self) -> CopyStats:
        """The copy that one request begins with."""
        return CopyStats(_inherit(self.proposed), _inherit(self.tokens), _inherit(self.ms))


@dataclass
class TextStats:
    """Statistics of texts, which all drafters share.

    Attributes:
        ngrams: how often n-gram matches are right.
        match_value: net worth of a round's n-gram match in tokens; 0 for rounds without one.
        copy_rounds: means over the rounds that proposed one.
        elapsed_ms, shadow_ms: the time of all requests, and that of drafts that worked for shadows alone.
    """

    ngrams: NgramShadow = field(default_factory=NgramShadow)
    match_value: RunningMean = field(default_factory=lambda: RunningMean(0.0, PRIOR_WEIGHT))
    copy_rounds: CopyStats = field(default_factory=CopyStats)
    elapsed_ms: float = 0.0
    shadow_ms: float = 0.0

    def child(self) -> TextStats:
        """The copy that one request begins with."""
        return TextStats(self.ngrams.child(PRIOR_WEIGHT), _inherit(self.match_value), self.copy_rounds.child())

    def take_round(self, source: Source, record: RoundRecord) -> None:
        """Count a round whose proposal, if there was one, came from `source`."""
        if source is Source.NGRAM and record.proposed:
            self.copy_rounds.take(record)


@dataclass
class AcceptanceStats:
    """How often one drafter's tokens are, or would have been, accepted, for greedy or for sampled texts.

    Attributes:
        by_depth: chance of the first choice at depth 1, 2, …, given that all above it are accepted.
        by_rank: chance of the second choice, third, …, given that none before it is the target's.
        by_q: chance of the first choice by its probability; coupled acceptance only.
        texts: statistics that do not depend on the drafter.
        positions: the number of positions whose ranks or averages have come.
        hits: share of rounds with outcome drafting whose outcome had a proposal when it came.
        pays: of the pool of all requests: whether drafting was the best strategy when the last request began.
        hit_length: tokens of such a proposal when its outcome came.
    """

    by_depth: list[RunningMean] = field(default_factory=_by_depth)
    by_rank: list[RunningMean] = field(default_factory=_by_rank)
    positions: int = 0
    by_q: AcceptanceRates = field(default_factory=_by_q)
    texts: TextStats = field(default_factory=TextStats)
    hits: RunningMean = field(default_factory=lambda: RunningMean(PRIOR_CHANCE, PRIOR_WEIGHT))
    hit_length: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    pays: bool = True

    def child(self) -> AcceptanceStats:
        """The copy that one request begins with."""
        return AcceptanceStats(
            [_inherit(mean) for mean in self.by_depth],
            [_inherit(mean) for mean in self.by_rank],
            0,
            self.by_q.child(PRIOR_WEIGHT),
            self.texts.child(),
            _inherit(self.hits),
            _inherit(self.hit_length),
        )

    def upper_bound(self, positions: int) -> AcceptanceStats:
        """The statistics at their upper bound, which approaches the mean as the drafter is tried.

        Args:
            positions: the number of positions at which any request has tried it.
        """
        share = OPTIMISM_WEIGHT / (OPTIMISM_WEIGHT + PRIOR_WEIGHT + positions)
        by_depth = [replace(mean, value=mean.value + share * (1 - mean.value)) for mean in self.by_depth]
        return replace(self, by_depth=by_depth)

    def take_rank(self, rank: int, q: float, run: int) -> None:
        """Count the rank of a committed token; 0: it is not among the ranked ones.

        Args:
            rank: of the token.
            q: of the first choice.
            run: the number of positions right before it whose tokens were all first choices. The token counts at the
                depth behind each of them, as if a proposal had begun there.
        """
        first = rank == 1
        self.positions += 1
        for depth in range(min(run + 1, MAX_DEPTH)):
            self.by_depth[depth].add(float(first))
        self.by_q.add(q, first)
        if not first:
            self._take_other(rank)

    def take_average(self, chance: float) -> None:
        """Count a chance of acceptance at every depth, where there are no ranks."""
        self.positions += 1
        for mean in self.by_depth:
            mean.add(chance)

    def take_proposal(self, proposal: Proposal, path: Sequence[int], first: int = 0) -> None:
        """Count a proposal's accepted path by depth, from depth `first` on; the shadow tells depths before it."""
        for depth in range(first, min(max(proposal.depths), len(path) + 1, MAX_DEPTH)):
            self.by_depth[depth].add(float(depth < len(path)))

    def take_ahead(self, proposal: Proposal | None) -> None:
        """Count a round with outcome drafting; `proposal` is that of its outcome, None: a miss."""
        self.hits.add(float(proposal is not None))
        if proposal is not None:
            self.hit_length.add(max(proposal.depths, default=0))

    def chances(self, most: int) -> list[float]:
        """`by_depth` at depths 1 to `most`."""
        return [mean.value for mean in self.by_depth[:most]]

    def others(self) -> list[float]:
        """`by_rank` from the second choice on."""
        return [mean.value for mean in self.by_rank]

    def node_chances(self, proposal: Proposal, *, by_q: bool) -> list[float]:
        """Chance of each node of a proposal; `by_q`: its own probability may be used."""
        chances: list[float] = []
        ranks: Counter[int] = Counter()
        for node, (parent, depth) in enumerate(zip(proposal.parents, proposal.depths, strict=True)):
            parent_chance = 1.0 if parent == ROOT else chances[parent]
            ranks[parent] += 1
            q = proposal.draft_probabilities[node]
            chances.append(parent_chance * self._chance(q, depth, ranks[parent], by_q=by_q))
        return chances

    def _chance(self, q: float, depth: int, rank: int, *, by_q: bool) -> float:
        """Chance of a node whose parent is accepted."""
        first = self.by_depth[min(depth, MAX_DEPTH) - 1].value
        if rank == 1:
            return self.by_q.chance(q) if by_q else first
        miss_chance = math.prod(1 - mean.value for mean in self.by_rank[: rank - 2])
        return (1 - first) * miss_chance * self.by_rank[min(rank, MAX_RANK) - 2].value

    def _take_other(self, rank: int) -> None:
        for place, mean in enumerate(self.by_rank, 2):
            mean.add(float(rank == place))
            if rank == place:
                return


def survival(chances: Iterable[float]) -> list[float]:
    """Chance that the first j tokens are all accepted, for j = 1, 2, …"""
    return list(itertools.accumulate(chances, operator.mul))


def _inherit(mean: RunningMean) -> RunningMean:
    return RunningMean(mean.value, min(PRIOR_WEIGHT, mean.weight))
