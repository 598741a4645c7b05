"""Which tokens of a drafter would have been the target's, learned from every committed position. Pure.

A drafter says of each committed token where it stood in its own order: its shadow rank. Under coupled acceptance
rank 1 is a token that would have been accepted, given that all before it were; so the row of ranks says what every
length would have brought, whether anything was proposed or not (`exactness` §7, replay). Rejection and block
acceptance learn averages by depth only, never from a token that was dropped.
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
"""Longest path that a model is asked for, and the depths that are told apart."""
MAX_RANK = 5
"""Places in a drafter's order that are told apart."""
PRIOR_CHANCE = 0.7
"""Acceptance before anything is known: drafts are made to be accepted, and one that isn't tried stays unknown. On
Spec-Bench the real pair's k = 4 accepts .8 to 2.7 tokens a round, chances of .47 to .84 a token
(docs/reports/spec-bench-pair-2026-11-24.md). The account bounds what trying costs."""
HOPED_WEIGHT = PRIOR_WEIGHT
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
class CopiedRounds:
    """Means of the rounds that proposed what followed a match: tokens proposed and committed, and milliseconds."""

    proposed: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    tokens: RunningMean = field(default_factory=lambda: RunningMean(1.0, 0.0))
    ms: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))

    def take(self, record: RoundRecord) -> None:
        """A round is over; a pause of the machine is no match's price."""
        self.proposed.add(record.proposed)
        self.tokens.add(record.accepted + 1)
        self.ms.add(min(record.round_ms, OUTLIER * self.ms.value) if self.ms.weight else record.round_ms)

    def child(self) -> CopiedRounds:
        """What one request begins with."""
        return CopiedRounds(_inherited(self.proposed), _inherited(self.tokens), _inherited(self.ms))


@dataclass
class SeenOfTexts:
    """What is known of texts whoever drafts beside: of several drafters all share it.

    Attributes:
        ngrams: how often n-gram matches are right.
        copied: tokens that a round's n-gram match is worth, less what they cost; 0 of rounds without one.
        copies: what the rounds gave and took that had one proposed.
        elapsed_ms, shadow_ms: of all requests: their time, and of drafts at work for shadow alone.
    """

    ngrams: NgramShadow = field(default_factory=NgramShadow)
    copied: RunningMean = field(default_factory=lambda: RunningMean(0.0, PRIOR_WEIGHT))
    copies: CopiedRounds = field(default_factory=CopiedRounds)
    elapsed_ms: float = 0.0
    shadow_ms: float = 0.0

    def child(self) -> SeenOfTexts:
        """What one request begins with."""
        return SeenOfTexts(self.ngrams.child(PRIOR_WEIGHT), _inherited(self.copied), self.copies.child())

    def take_round(self, source: Source, record: RoundRecord) -> None:
        """A round is over whose proposal, if there was one, came from there."""
        if source is Source.NGRAM and record.proposed:
            self.copies.take(record)


@dataclass
class Seen:
    """What became, or would have become, of one drafter's tokens under one way of sampling.

    Attributes:
        by_depth: chance of the first choice at depth 1, 2, …, given that all above it are accepted.
        by_rank: chance of the second choice, third, …, given that none before it is the target's.
        by_q: chance of the first choice by its probability; coupled acceptance only.
        texts: what does not depend on the drafter.
        positions: whose ranks or averages have come.
        hits: share of rounds with outcome drafting whose outcome had been drafted for when it came.
        pays: of a pool: whether drafting was the best way by what was known when the last request began.
        hit_length: tokens of a proposal that had been drafted ahead when its outcome came.
    """

    by_depth: list[RunningMean] = field(default_factory=_by_depth)
    by_rank: list[RunningMean] = field(default_factory=_by_rank)
    positions: int = 0
    by_q: AcceptanceRates = field(default_factory=_by_q)
    texts: SeenOfTexts = field(default_factory=SeenOfTexts)
    hits: RunningMean = field(default_factory=lambda: RunningMean(PRIOR_CHANCE, PRIOR_WEIGHT))
    hit_length: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    pays: bool = True

    def child(self) -> Seen:
        """What one request begins with."""
        return Seen(
            [_inherited(mean) for mean in self.by_depth],
            [_inherited(mean) for mean in self.by_rank],
            0,
            self.by_q.child(PRIOR_WEIGHT),
            self.texts.child(),
            _inherited(self.hits),
            _inherited(self.hit_length),
        )

    def hoped(self, tried: int) -> Seen:
        """What this drafter may turn out to be: its upper bound, which comes down to the mean as it is tried.

        Args:
            tried: positions that any request has seen it at.
        """
        share = HOPED_WEIGHT / (HOPED_WEIGHT + PRIOR_WEIGHT + tried)
        by_depth = [replace(mean, value=mean.value + share * (1 - mean.value)) for mean in self.by_depth]
        return replace(self, by_depth=by_depth)

    def take_rank(self, rank: int, q: float, run: int) -> None:
        """A committed token stood at this rank; 0: beyond the ranked ones.

        Args:
            rank: of the token.
            q: of the first choice.
            run: positions right before whose tokens were all first choices. The token stands behind each of them, as
                if a proposal had begun there.
        """
        first = rank == 1
        self.positions += 1
        for depth in range(min(run + 1, MAX_DEPTH)):
            self.by_depth[depth].add(float(first))
        self.by_q.add(q, first)
        if not first:
            self._take_other(rank)

    def take_average(self, chance: float) -> None:
        """A position had this chance of acceptance, at whatever depth: where ranks don't tell."""
        self.positions += 1
        for mean in self.by_depth:
            mean.add(chance)

    def take_proposal(self, proposal: Proposal, path: Sequence[int], first: int = 0) -> None:
        """A proposal ended so: averages by depth, from the `first` that shadow ranks don't tell."""
        for depth in range(first, min(max(proposal.depths), len(path) + 1, MAX_DEPTH)):
            self.by_depth[depth].add(float(depth < len(path)))

    def take_ahead(self, cached: Proposal | None) -> None:
        """A round came for whose outcomes proposals had been drafted: the one that there was, None: a miss."""
        self.hits.add(float(cached is not None))
        if cached is not None:
            self.hit_length.add(max(cached.depths, default=0))

    def chances(self, most: int) -> list[float]:
        """`by_depth` at depths 1 to `most`."""
        return [mean.value for mean in self.by_depth[:most]]

    def others(self) -> list[float]:
        """`by_rank` from the second choice on."""
        return [mean.value for mean in self.by_rank]

    def reached(self, proposal: Proposal, *, by_q: bool) -> list[float]:
        """Chance of each node of a proposal; `by_q`: its probability may be looked at."""
        reached: list[float] = []
        ranks: Counter[int] = Counter()
        for node, (parent, depth) in enumerate(zip(proposal.parents, proposal.depths, strict=True)):
            above = 1.0 if parent == ROOT else reached[parent]
            ranks[parent] += 1
            reached.append(above * self._chance(proposal.draft_probabilities[node], depth, ranks[parent], by_q=by_q))
        return reached

    def _chance(self, q: float, depth: int, rank: int, *, by_q: bool) -> float:
        """Of a node whose parent is accepted."""
        first = self.by_depth[min(depth, MAX_DEPTH) - 1].value
        if rank == 1:
            return self.by_q.chance(q) if by_q else first
        before = math.prod(1 - mean.value for mean in self.by_rank[: rank - 2])
        return (1 - first) * before * self.by_rank[min(rank, MAX_RANK) - 2].value

    def _take_other(self, rank: int) -> None:
        for place, mean in enumerate(self.by_rank, 2):
            mean.add(float(rank == place))
            if rank == place:
                return


def survival(chances: Iterable[float]) -> list[float]:
    """Chance that the first j tokens are all accepted, for j = 1, 2, …"""
    return list(itertools.accumulate(chances, operator.mul))


def _inherited(mean: RunningMean) -> RunningMean:
    return RunningMean(mean.value, min(PRIOR_WEIGHT, mean.weight))
