"""The coordinator's own planner in the simulator: the one file of it that knows the planner's interface.

Tokens are numbers made up: the right one at a position is `1 + position`, a wrong one 0.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from coordinator.policy.plan import Options, Plan
from coordinator.policy.planner import Planner, RequestPlanner
from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol.draft import Shadow
from paceline.protocol.explanation import PlanExplanation
from paceline.protocol.proposal import AUTO, NGRAM, Acceptance, Proposal
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.sampling.match import MAX_FOLLOWING, Match
from paceline_lab.simulate.policies import RoundFacts, Situation

if TYPE_CHECKING:
    from paceline_lab.simulate.coordinator import CoordinatorProcess
    from paceline_lab.simulate.draft import SimulatedDraft
    from paceline_lab.simulate.target import SimulatedTarget
    from paceline_lab.simulate.trees import ProposedTree

DRAFTER = "model"
UNKNOWN_TOKENS = (0,) * MAX_FOLLOWING
LEAST_CHANCE = 1e-6
"""A proposal's probabilities are above 0."""


class SimulatedTargetPeer:
    """What a coordinator knows of the simulated target: said with each step's verdicts."""

    def __init__(self, target: SimulatedTarget) -> None:
        self._target = target
        self._said_at = -1
        self._said = TargetCosts()

    @property
    def costs(self) -> TargetCosts:
        """As the target says now."""
        target = self._target
        if self._said_at != target.steps:
            self._said_at = target.steps
            alone, beside = target.stated_alone.line, target.stated_beside.line
            self._said = TargetCosts(alone, beside, target.in_step, target.rows, target.queue)
        return self._said


class SimulatedDraftPeer:
    """What a coordinator knows of the simulated draft service."""

    def __init__(self, draft: SimulatedDraft) -> None:
        self._draft = draft
        self._said_at = -1
        self._said = DraftCosts()

    @property
    def costs(self) -> DraftCosts:
        """As the draft service says now."""
        draft = self._draft
        if self._said_at != draft.steps:
            self._said_at = draft.steps
            self._said = DraftCosts(draft.stated.line, draft.in_step, draft.rows, draft.queue)
        return self._said


class PlannedPolicy:
    """A coordinator's planner: one for each run, fresh, as after a start of the services."""

    name = AUTO

    def __init__(self, *, greedy: bool = False) -> None:
        self._greedy = greedy
        self._planners: WeakKeyDictionary[CoordinatorProcess, SimulatedPlanner] = WeakKeyDictionary()

    def session(self, home: CoordinatorProcess) -> PlannedSession:
        """Of a new request."""
        planner = self._planners.get(home)
        if planner is None:
            planner = self._planners[home] = SimulatedPlanner(home)
        return PlannedSession(planner, greedy=self._greedy)


class SimulatedPlanner:
    """A coordinator's planner and its peers."""

    def __init__(self, home: CoordinatorProcess) -> None:
        self.planner = Planner()
        self._targets: dict[SimulatedTarget, SimulatedTargetPeer] = {}
        self._drafts: dict[SimulatedDraft, SimulatedDraftPeer] = {}
        layout = home.layout
        self.fan_out = layout.fan_out if layout.drafts else 0
        self.prefetches = layout.max_prefetched > 0

    def target(self, target: SimulatedTarget) -> SimulatedTargetPeer:
        """The coordinator's end of the link to it."""
        if target not in self._targets:
            self._targets[target] = SimulatedTargetPeer(target)
        return self._targets[target]

    def draft(self, draft: SimulatedDraft | None) -> SimulatedDraftPeer | None:
        """The coordinator's end of the link to it; None: there is none."""
        if draft is not None and draft not in self._drafts:
            self._drafts[draft] = SimulatedDraftPeer(draft)
        return None if draft is None else self._drafts[draft]


class PlannedSession:
    """One request's planner, asked and told as `coordinator/policy/drafting.py` does it."""

    learns = True

    def __init__(self, at: SimulatedPlanner, *, greedy: bool) -> None:
        self._at = at
        self._planner = RequestPlanner(at.planner, AUTO, Acceptance.COUPLED, greedy=greedy)
        self._drafted = False
        self._shadowed = 0
        """Positions whose shadow was told, one behind the other."""

    @property
    def expects_drafts(self) -> bool:
        """Whether drafting was to pay when the last request began."""
        return self._at.fan_out > 0 and self._planner.expects_drafts

    def placed(self, target: SimulatedTarget, draft: SimulatedDraft | None) -> None:
        """The request's sessions are there now."""
        self._planner.move(self._at.target(target), self._at.draft(draft))

    def plan(self, situation: Situation) -> Plan:
        """What the next round should do; before the first the request is nowhere yet."""
        at = self._at
        return self._planner.plan(
            Options(
                room=situation.room,
                match=_match(situation),
                cached_proposal=_proposal(situation.cached, situation.chances) if situation.cached else None,
                drafts=situation.drafts,
                lag=situation.lag,
                open_ms=situation.open_ms,
                fan_out=at.fan_out,
                trees=True,
                leased_rounds=situation.leased,
                lease=situation.lease,
                self_started=situation.self_started,
                can_prefetch=at.prefetches and not situation.first,
            )
        )

    def copied(self, length: int, proposed: int, room: int) -> int:
        """How far to follow a match behind a round that has its first tokens."""
        if proposed:
            return self._planner.worth_copying(Match(length + proposed + 1, UNKNOWN_TOKENS), room)
        return self._planner.worth_prefetching(Match(length, UNKNOWN_TOKENS), room)

    def worth(self, drafted: ProposedTree, chances: tuple[float, ...]) -> int:
        """How much of a prefetched proposal is worth verifying."""
        worth = self._planner.worth_verifying(_proposal(drafted, chances))
        return len(worth) if worth is not None else 0

    def took_shadow(self, ranks: tuple[int, ...], chances: tuple[float, ...]) -> None:
        """The draft says where committed tokens stood."""
        self._planner.take_shadow(Shadow(1, self._shadowed, ranks, chances))
        self._shadowed += len(ranks)

    def took_match(self, situation: Situation, committed: int) -> None:
        """So many tokens were committed behind the match that stood."""
        tokens = range(1 + situation.position, 1 + situation.position + committed)
        self._planner.take_match(_match(situation), tokens)

    def took_late(self, waited_ms: float, depth: int) -> None:
        """A round waited in vain."""
        self._planner.take_late(waited_ms, depth)

    def learn(self, plan: Plan, facts: RoundFacts) -> None:
        """What became of a plan."""
        step = StepTimings(
            facts.queue_ms, facts.step_ms, 0.0, facts.queue_ms + facts.step_ms, facts.rows, facts.sessions
        )
        draft = StepTimings(0.0, facts.draft_ms, 0.0, facts.draft_ms, facts.draft_rows, 1)
        proposal = _proposed(facts.nodes, NGRAM if facts.by_match else DRAFTER) if facts.nodes else None
        record = RoundRecord(
            base_length=facts.position,
            round_ms=facts.round_ms,
            draft_wait_ms=facts.draft_wait_ms,
            wire_ms=facts.wire_ms,
            target=step,
            accept_ms=0.0,
            proposed=facts.proposed,
            accepted=facts.accepted,
            cache_hit=facts.hit,
            drafter=proposal.drafter if proposal else "",
            draft=draft,
            cache_miss=facts.missed,
            self_started=facts.self_started,
        )
        first = facts.draft_ms > 0 and not self._drafted
        self._drafted = self._drafted or facts.draft_ms > 0
        self._planner.learn(plan, record, proposal, range(facts.accepted), first_draft=first)

    def explain(self) -> PlanExplanation:
        """Why it was drafted for as it was."""
        return self._planner.explain()

    def close(self) -> None:
        """The request has ended."""
        self._planner.close()


def _match(situation: Situation) -> Match | None:
    """The match before a position, with as many of its tokens right as are."""
    if not situation.match:
        return None
    first, right = 1 + situation.position, situation.match_right
    return Match(situation.match, (*range(first, first + right), *(0,) * (MAX_FOLLOWING - right)))


def _proposal(drafted: ProposedTree, chances: tuple[float, ...]) -> Proposal:
    """Of the choices beside the first ones a planner looks at the rank alone."""
    q = (chances[depth - 1] if rank == 1 else 0.0 for rank, depth in zip(drafted.ranks, drafted.depths, strict=True))
    probabilities = tuple(max(LEAST_CHANCE, each) for each in q)
    return Proposal(1, (0,) * len(drafted), probabilities, drafted.parents, drafter=DRAFTER)


@cache
def _proposed(nodes: int, drafter: str) -> Proposal:
    """Of a round that is over: only its size is read."""
    return Proposal(1, (0,) * nodes, (0.5,) * nodes, drafter=drafter)
