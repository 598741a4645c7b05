"""Requests that run against costs and chances that are set by hand, planned by the planner itself."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.planner import Planner, RequestPlanner
from paceline.costs.cost_line import CostLine
from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol.draft import Shadow
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.records import RoundRecord, StepTimings

STEP_MS = 20.0
ROW_MS = 0.5
DRAFT_MS = 2.0
SENT_MS = 1.0


def line(step_ms: float, row_ms: float) -> CostLine:
    return CostLine(((1.0, step_ms), (65.0, step_ms + 64 * row_ms)))


@dataclass(eq=False)
class SaidByTarget:
    """A target's peer: what it says of its steps."""

    step_ms: float = STEP_MS
    row_ms: float = ROW_MS
    slower: float = 1.0
    sessions: int = 1

    @property
    def costs(self) -> TargetCosts:
        alone = line(self.step_ms, self.row_ms)
        return TargetCosts(alone, alone.scale(self.slower), self.sessions, self.sessions)


@dataclass(eq=False)
class SaidByDraft:
    """A draft service's peer."""

    step_ms: float = DRAFT_MS
    row_ms: float = 0.1

    @property
    def costs(self) -> DraftCosts:
        return DraftCosts(line(self.step_ms, self.row_ms))


def record(rows: int = 1, accepted: int = 0, proposed: int = 0, **changes: object) -> RoundRecord:
    """A round alone on the target, sent unless it says otherwise."""
    step = StepTimings(forward_ms=STEP_MS + ROW_MS * (rows - 1), rows=rows, sessions=1)
    made = RoundRecord(9, step.forward_ms + SENT_MS, 0.0, SENT_MS, step, 0.0, proposed, accepted, cache_hit=False)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


Chance = Callable[[int], float]
"""Of the draft's token at a position."""


@dataclass
class World:
    """One request at a time against a target and a draft that really take `target` and `draft`.

    `said_target` and `said_draft` are what they say; the same unless a test has them lie.
    """

    planner: Planner = field(default_factory=Planner)
    target: SaidByTarget = field(default_factory=SaidByTarget)
    draft: SaidByDraft = field(default_factory=SaidByDraft)
    said_target: SaidByTarget | None = None
    said_draft: SaidByDraft | None = None
    q: float = 0.8
    loss_ms: list[tuple[int, float]] = field(default_factory=list)
    """Of the latest request: tokens written, and the time beyond target-only's for them, at the end of each round."""

    def request(self, acceptance: Acceptance = Acceptance.COUPLED, *, greedy: bool = True) -> RequestPlanner:
        made = RequestPlanner(self.planner, "auto", acceptance, greedy=greedy)
        self.said_target = self.said_target or self.target
        self.said_draft = self.said_draft or self.draft
        made.move(self.said_target, self.said_draft)
        return made

    def run(
        self,
        chance: Chance,
        tokens: int = 128,
        seed: int = 0,
        acceptance: Acceptance = Acceptance.COUPLED,
        before_round: Callable[[int], None] = lambda written: None,
    ) -> tuple[float, list[Plan]]:
        """A whole request; returns its time over target-only's, and its plans."""
        rng = random.Random(seed)
        self.loss_ms = []
        request, plans, written, ms = self.request(acceptance), list[Plan](), 0, 0.0
        plain_ms = 0.0
        while written < tokens:
            before_round(written)
            plan = request.plan(Options(room=tokens - written + 1, drafts=True, lease=16))
            plans.append(plan)
            committed, took = self._round(request, plan, rng, chance, written)
            written += committed
            ms += took
            plain_ms += committed * self.target.step_ms
            self.loss_ms.append((written, ms - plain_ms))
        request.close()
        return ms / plain_ms, plans

    def _drafted(self, plan: Plan, chance: Chance, at: int) -> int:
        """Tokens that a draft which knows its chances proposes."""
        if plan.source is not Source.WAIT:
            return 0
        reached = itertools.accumulate((chance(at + place) for place in range(plan.depth)), operator.mul)
        return sum(1 for _ in itertools.takewhile(lambda each: each >= plan.least_chance, reached))

    def _round(
        self, request: RequestPlanner, plan: Plan, rng: random.Random, chance: Chance, at: int
    ) -> tuple[int, float]:
        proposed = self._drafted(plan, chance, at)
        accepted = 0
        while accepted < proposed and rng.random() < chance(at + accepted):
            accepted += 1
        drafting_ms = max(proposed, plan.source is Source.WAIT) * self.draft.step_ms
        wait_ms = min(drafting_ms, plan.patience_ms)
        if drafting_ms > plan.patience_ms:
            proposed = accepted = 0
        step_ms = self.target.costs.alone.ms(1 + proposed)
        round_ms = wait_ms + step_ms + (SENT_MS if proposed or not plan.lease else 0.0)
        seen = RoundRecord(
            9, round_ms, wait_ms, 0.0, StepTimings(forward_ms=step_ms, rows=1 + proposed, sessions=1), 0.0,
            proposed, accepted, cache_hit=False, draft=StepTimings(forward_ms=drafting_ms, rows=1),
            self_started=not proposed and plan.lease > 0,
        )  # fmt: skip
        proposal = Proposal(1, (7,) * proposed, (self.q,) * proposed, drafter="model") if proposed else None
        request.learn(plan, seen, proposal, tuple(range(accepted)))
        ranks = [1] * accepted
        if proposed > accepted:
            ranks.append(2)
        elif plan.shadow or plan.source is Source.WAIT:
            ranks.append(1 if rng.random() < chance(at + accepted) else 2)
        if ranks:
            request.stats.take_shadow(Shadow(1, at, tuple(ranks), (self.q,) * len(ranks)))
        return accepted + 1, round_ms
