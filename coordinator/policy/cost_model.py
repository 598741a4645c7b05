"""What a coordinator has measured, shared by its requests: costs in time, and what became of proposals. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.policy.throttle import Throttle
from paceline.costs.acceptance import AcceptanceRates
from paceline.costs.running_mean import RunningMean
from paceline.costs.step_cost import StepCost

MATCH_EDGES = (3.0, 4.0, 5.0, 7.0, 10.0, 16.0, 32.0)
"""Bins of an n-gram match's length, in tokens."""
Q_EDGES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)
"""Bins of the probability that a draft model gave to its token."""
DEPTH_EDGES = (2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 13.0)
"""Bins of a token's depth in a proposal."""
RANK_EDGES = (3.0, 4.0, 5.0)
"""Bins of a token's rank among its siblings, from the second on."""
RANKS = 3
"""A node's further children share what is known of the last of these."""
REMEMBERED_VALUES = 8.0
"""Rounds over which a request remembers how much its best proposals were worth."""
REQUEST_WEIGHT = 8.0
"""Observations that what other requests have learned counts in a new one."""


def _by_match() -> AcceptanceRates:
    return AcceptanceRates.of(MATCH_EDGES, lambda length: length / (length + 4.0), 4.0)


def _by_q() -> tuple[AcceptanceRates, ...]:
    best = AcceptanceRates.of(Q_EDGES, lambda q: 0.2 + 0.75 * q, 6.0)
    others = (AcceptanceRates.of(Q_EDGES, lambda q: 0.1 + 0.2 * q, 6.0) for _ in range(1, RANKS))
    return (best, *others)


def _by_depth() -> AcceptanceRates:
    return AcceptanceRates.of(DEPTH_EDGES, lambda depth: 0.55, 6.0)


def _by_rank() -> AcceptanceRates:
    return AcceptanceRates.of(RANK_EDGES, lambda rank: 0.16 / max(1.0, rank - 1), 6.0)


@dataclass(frozen=True)
class AcceptanceStatistics:
    """What became of the proposals of one drafter, under one way of sampling.

    Attributes:
        by_match: acceptance of an n-gram match's next token, by the match's length.
        by_q: acceptance of a model's token by its draft probability, one table for each rank among its siblings.
            For coupled acceptance only: rejection and block acceptance must not look at it (`exactness` §7).
        by_depth: acceptance of a model's best token by its depth.
        by_rank: acceptance of a model's second token, third, …, by its rank, where none before it was the target's.
        hits: share of rounds with outcome drafting whose outcome had been drafted for when it came.
        worth: value of a round's best proposal, in tokens.
    """

    by_match: AcceptanceRates = field(default_factory=_by_match)
    by_q: tuple[AcceptanceRates, ...] = field(default_factory=_by_q)
    by_depth: AcceptanceRates = field(default_factory=_by_depth)
    by_rank: AcceptanceRates = field(default_factory=_by_rank)
    hits: RunningMean = field(default_factory=lambda: RunningMean(0.7, 4.0))
    worth: RunningMean = field(default_factory=lambda: RunningMean(1.0, 1.0))

    def child(self) -> AcceptanceStatistics:
        """A copy with which one request begins, and learns on for itself."""
        return AcceptanceStatistics(
            self.by_match.child(REQUEST_WEIGHT),
            tuple(table.child(REQUEST_WEIGHT) for table in self.by_q),
            self.by_depth.child(REQUEST_WEIGHT),
            self.by_rank.child(REQUEST_WEIGHT),
            RunningMean(self.hits.value, REQUEST_WEIGHT),
            RunningMean(self.worth.value, 1.0, limit=REMEMBERED_VALUES),
        )


@dataclass(frozen=True)
class RoundCosts:
    """Time that things take in any request; milliseconds.

    Attributes:
        verify: a target step by its rows, while no outcomes are drafted for.
        step: a target step by its rows, in any case: when a verdict is due.
        outcome_drafting: what outcome drafting adds to a target step; about 0 where the services share no hardware.
        plain: a target-only token in a round that the target starts by itself: what drafting must beat.
        plain_sent, plain_ahead: a round without a proposal that the coordinator sent, or that the target started.
        sent: what a round that the coordinator sent takes beyond its step and its draft.
        ahead: the same for a round that the target started by itself.
        draft_step: one level of a proposal that is drafted just in time.
        draft_wire: the wait for such a proposal beyond its steps.
        queue: how long a round that is sent waits at the target for its step.
        queue_late: the same for a round that waited for its proposal: it may have missed the step that others share.
    """

    verify: StepCost = field(default_factory=StepCost)
    step: StepCost = field(default_factory=StepCost)
    outcome_drafting: RunningMean = field(default_factory=lambda: RunningMean(0.0, 1.0))
    plain: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    plain_sent: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    plain_ahead: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    sent: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    ahead: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    draft_step: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    draft_wire: RunningMean = field(default_factory=lambda: RunningMean(1.0, 1.0))
    queue: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))
    queue_late: RunningMean = field(default_factory=lambda: RunningMean(0.0, 0.0))

    @property
    def round_trip(self) -> float:
        """How much later a round's step begins if the coordinator sends the round than if the target starts it."""
        return max(0.0, self.sent.value - self.ahead.value)

    @property
    def sending(self) -> float:
        """How much longer a round takes if the coordinator sends it, as it must one that carries a proposal.

        More than the round trip where the target's threads and caches cool down meanwhile: its step takes longer.
        """
        known = self.plain_sent.weight and self.plain_ahead.weight
        return max(self.round_trip, self.plain_sent.value - self.plain_ahead.value) if known else self.round_trip

    def wait(self, depth: int) -> float:
        """How much later a round is verified if it waits for a proposal of this depth.

        It may miss the step that others share, or wait for its draft while it would have waited for that step.
        """
        known = self.queue.weight and self.queue_late.weight
        later = self.queue_late.value - self.queue.value if known else 0.0
        return max(0.0, self.draft_wire.value + depth * self.draft_step.value + later)


class CostModel:
    """All that a coordinator has measured, read and added to by its requests. One per coordinator."""

    def __init__(self) -> None:
        self.costs = RoundCosts()
        self.throttle = Throttle()
        self._statistics_of: dict[tuple[str, bool], AcceptanceStatistics] = {}

    def of(self, drafter: str, greedy: bool) -> AcceptanceStatistics:
        """What became of a drafter's proposals; greedy and sampled texts differ too much to share."""
        return self._statistics_of.setdefault((drafter, greedy), AcceptanceStatistics())
