"""What a simulated session asks before each round, and policies that never change their mind.

The coordinator's planner answers the same questions (`paceline_lab/simulate/planned.py`, the one file that knows it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from coordinator.policy.plan import Plan, Source
from paceline.protocol.errors import require

if TYPE_CHECKING:
    from paceline_lab.simulate.coordinator import CoordinatorProcess
    from paceline_lab.simulate.draft import SimulatedDraft
    from paceline_lab.simulate.rounds import RoundAtTarget
    from paceline_lab.simulate.target import SimulatedTarget
    from paceline_lab.simulate.trees import ProposedTree

MAX_CONSTANT = 16
"""Longest proposal of a constant policy."""
AHEAD_FAN_OUT = 4
"""Outcomes for each node that a policy drafts for ahead of time, as coordinators do where nothing else is set."""


TARGET_ONLY = Plan()


@dataclass(slots=True)
class Situation:
    """What a round may choose from.

    Attributes:
        position: tokens committed so far.
        room: most tokens that a proposal may have.
        match: length of the n-gram match; 0: none.
        match_right: how much of its continuation is right. No policy may look at it: the match's tokens hold it.
        cached: what was drafted for this outcome; None: nothing.
        chances: with it, the draft's probability of its first choice from the next token on.
        drafts: whether a draft service could be asked.
        leased: rounds, this one included, that the target may have started.
        self_started: whether it has started this one with a prefetched proposal.
        lease: most rounds behind this one that the target may start.
        first: whether it is the request's first round.
        lag, open_ms: tokens that the draft may still be computing, since it opened the session so long ago.
    """

    position: int = 0
    room: int = 0
    match: int = 0
    match_right: int = 0
    cached: ProposedTree | None = None
    chances: tuple[float, ...] = ()
    drafts: bool = False
    leased: int = 0
    self_started: bool = False
    lease: int = 0
    first: bool = True
    lag: int = 0
    open_ms: float = 0.0


@dataclass(slots=True)
class RoundFacts:
    """What became of a round: `paceline.protocol.records.RoundRecord` for the simulator. Milliseconds."""

    position: int
    round_ms: float
    draft_wait_ms: float
    wire_ms: float
    queue_ms: float
    step_ms: float
    rows: int
    sessions: int
    proposed: int
    nodes: int
    accepted: int
    by_match: bool
    hit: bool
    missed: bool
    self_started: bool
    draft_ms: float
    draft_rows: int
    late: bool

    @classmethod
    def of(
        cls,
        round_: RoundAtTarget,
        decided: float,
        now: float,
        draft_ms: float,
        draft_rows: int,
        *,
        missed: bool,
        late: bool,
    ) -> RoundFacts:
        """Of a round whose verdict is dealt with now; `decided`: when the one before was."""
        sent = decided if round_.self_started else round_.sent
        return cls(
            position=round_.position,
            round_ms=now - decided,
            draft_wait_ms=max(0.0, sent - decided),
            wire_ms=max(0.0, now - sent - round_.queue_ms - round_.step_ms),
            queue_ms=round_.queue_ms,
            step_ms=round_.step_ms,
            rows=round_.rows,
            sessions=round_.sessions,
            proposed=round_.depth,
            nodes=round_.nodes,
            accepted=round_.accepted,
            by_match=round_.source is Source.NGRAM,
            hit=round_.source is Source.CACHED,
            missed=missed,
            self_started=round_.self_started,
            draft_ms=draft_ms,
            draft_rows=draft_rows,
            late=late,
        )


class SessionPolicy(Protocol):
    """Plans one session's rounds."""

    learns: bool
    """Whether it wants to be told of rounds, shadows and matches."""

    @property
    def expects_drafts(self) -> bool:
        """Whether a draft computes a request's prompt as it comes."""

    def placed(self, target: SimulatedTarget, draft: SimulatedDraft | None) -> None:
        """The session is at these services now; its first round is planned before."""

    def plan(self, situation: Situation) -> Plan:
        """What the next round should do."""

    def copied(self, length: int, proposed: int, room: int) -> int:
        """How far to follow a match of this length behind a round that has its first tokens; 0: don't prefetch."""

    def worth(self, drafted: ProposedTree, chances: tuple[float, ...]) -> int:
        """How many nodes of a proposal for an outcome are worth prefetching, by the draft's probabilities."""

    def took_shadow(self, ranks: tuple[int, ...], chances: tuple[float, ...]) -> None:
        """The draft says where committed tokens stood."""

    def took_match(self, situation: Situation, committed: int) -> None:
        """So many tokens were committed behind the match of a situation."""

    def took_late(self, waited_ms: float, depth: int) -> None:
        """A round waited so long for a proposal that did not come."""

    def learn(self, plan: Plan, facts: RoundFacts) -> None:
        """What became of a plan."""

    def close(self) -> None:
        """The session has ended."""


class Policy(Protocol):
    """Makes a coordinator's sessions their policies."""

    @property
    def name(self) -> str:
        """As tables show it."""

    def session(self, home: CoordinatorProcess) -> SessionPolicy:
        """Of a new session of a coordinator."""


class _Constant:
    """Never learns. Follows what was drafted ahead, else waits."""

    learns = False

    def __init__(self, k: int, fan_out: int, *, whole: bool) -> None:
        self._k = k
        self.expects_drafts = k > 0
        self._fan_out = fan_out
        self._whole = whole
        self._wait = [self._fixed(Source.WAIT, n) for n in range(k + 1)]
        self._cached = [self._fixed(Source.CACHED, n) for n in range(k + 1)]

    def _fixed(self, source: Source, n: int) -> Plan:
        branch = self._k if self._fan_out else 0
        return (
            Plan(source, n, n, fan_out=self._fan_out, branch_depth=branch, branch_nodes=branch) if n else TARGET_ONLY
        )

    def placed(self, target: SimulatedTarget, draft: SimulatedDraft | None) -> None:
        """It is the same everywhere."""

    def plan(self, situation: Situation) -> Plan:
        if not self._k:
            return _leased(situation.lease)
        n = min(self._k, situation.room)
        if situation.self_started:
            return self._wait[n]
        if situation.cached is not None and (not self._whole or len(situation.cached) >= n):
            return self._cached[min(n, len(situation.cached))]
        return self._wait[n] if situation.drafts else TARGET_ONLY

    def copied(self, length: int, proposed: int, room: int) -> int:
        return 0

    def worth(self, drafted: ProposedTree, chances: tuple[float, ...]) -> int:
        return len(drafted)

    def took_shadow(self, ranks: tuple[int, ...], chances: tuple[float, ...]) -> None:
        """Nothing is learned."""

    def took_match(self, situation: Situation, committed: int) -> None:
        """Nothing is learned."""

    def took_late(self, waited_ms: float, depth: int) -> None:
        """Nothing is learned."""

    def learn(self, plan: Plan, facts: RoundFacts) -> None:
        """Nothing is learned."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class ConstantPolicy:
    """k tokens in every round; 0: target-only, under leases. With a fan-out outcomes are drafted for meanwhile.

    `whole`: a round waits until all k tokens are drafted for its outcome, as engines do whose draft and target take
    turns in step; they prefetch nothing.
    """

    k: int
    fan_out: int = 0
    whole: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.k <= MAX_CONSTANT, "k", self.k, f"in [0, {MAX_CONSTANT}]")
        require(self.fan_out >= 0, "fan_out", self.fan_out, "at least 0")

    @property
    def name(self) -> str:
        """As `paceline simulate --k` takes it, but for whole ones."""
        kind = "whole" if self.whole else "ahead"
        return f"{self.k}+{kind}" if self.k and self.fan_out else str(self.k)

    def session(self, home: CoordinatorProcess) -> SessionPolicy:
        """One that holds nothing."""
        return _Constant(self.k, self.fan_out, whole=self.whole)


_LEASED: dict[int, Plan] = {}


def _leased(lease: int) -> Plan:
    return _LEASED.setdefault(lease, Plan(lease=lease))
