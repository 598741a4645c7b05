"""The coordinator's own planner in the simulator: the one file of it that knows the planner's interface.

Tokens are numbers made up: the right one at a position is `1 + position`, a wrong one 0.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from benchmarks.simulator.policies import RoundFacts, SessionPolicy, Situation
from coordinator.policy.plan import Options, Plan
from coordinator.policy.planner import Planner, RequestPlanner
from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol.draft import Shadow
from paceline.protocol.proposal import AUTO, NGRAM, Acceptance, Proposal
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.sampling.ngram import MAX_FOLLOWING, Match

if TYPE_CHECKING:
    from benchmarks.simulator.draft import SimulatedDraft
    from benchmarks.simulator.services import SimulatedServices
    from benchmarks.simulator.target import SimulatedTarget

DRAFTER = "model"
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
        self._coordinators: WeakKeyDictionary[SimulatedServices, SimulatedCoordinator] = WeakKeyDictionary()

    def session(self, services: SimulatedServices) -> SessionPolicy:
        """Of a new request."""
        coordinator = self._coordinators.get(services)
        if coordinator is None:
            coordinator = self._coordinators[services] = SimulatedCoordinator(services)
        return PlannedSession(coordinator, greedy=self._greedy)


class SimulatedCoordinator:
    """A planner and its peers."""

    def __init__(self, services: SimulatedServices) -> None:
        self.planner = Planner()
        self.target = SimulatedTargetPeer(services.target)
        self.draft = SimulatedDraftPeer(services.draft) if services.draft is not None else None
        self.fan_out = services.fan_out if services.draft is not None else 0
        self.prefetches = services.max_prefetched > 0


class PlannedSession:
    """One request's planner, asked and told as `coordinator/policy/drafting.py` does it."""

    learns = True

    def __init__(self, coordinator: SimulatedCoordinator, *, greedy: bool) -> None:
        self._coordinator = coordinator
        self._planner = RequestPlanner(coordinator.planner, AUTO, Acceptance.COUPLED, greedy=greedy)
        self._drafted = False
        self._shadowed = 0
        """Positions whose shadow was told, one behind the other."""

    def plan(self, situation: Situation) -> Plan:
        """What the next round should do; before the first the request is nowhere yet."""
        at = self._coordinator
        if not situation.first:
            self._planner.move(at.target, at.draft)
        return self._planner.plan(
            Options(
                room=situation.room,
                match=_match(situation),
                cached=None if situation.cached is None else _cached(situation.cached),
                drafts=situation.drafts,
                fan_out=at.fan_out,
                trees=True,
                leased=situation.leased,
                lease=situation.lease,
                self_started=situation.self_started,
                can_prefetch=at.prefetches and not situation.first,
            )
        )

    def copied(self, length: int, proposed: int, room: int) -> int:
        """How far to follow a match behind a round that has its first tokens."""
        if proposed:
            return self._planner.worth_copying(length + proposed + 1, room)
        return self._planner.worth_prefetching(length, room)

    def worth(self, chances: tuple[float, ...]) -> int:
        """How much of a prefetched proposal is worth verifying."""
        worth = self._planner.worth_verifying(_cached(chances))
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

    def close(self) -> None:
        """The request has ended."""
        self._planner.close()


def _match(situation: Situation) -> Match | None:
    """The match before a position, with as many of its tokens right as are."""
    if not situation.match:
        return None
    first, right = 1 + situation.position, situation.match_right
    return Match(situation.match, (*range(first, first + right), *(0,) * (MAX_FOLLOWING - right)))


def _cached(chances: tuple[float, ...]) -> Proposal:
    probabilities = tuple(max(LEAST_CHANCE, chance) for chance in chances[:MAX_FOLLOWING])
    return Proposal(1, (0,) * len(probabilities), probabilities, drafter=DRAFTER)


@cache
def _proposed(nodes: int, drafter: str) -> Proposal:
    """Of a round that is over: only its size is read."""
    return Proposal(1, (0,) * nodes, (0.5,) * nodes, drafter=drafter)
