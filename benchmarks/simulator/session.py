"""A simulated request: `coordinator/round.py` on the virtual clock, with its session on the target and on the draft.

`done` counts tokens that the coordinator has committed, `at_target` those that the target has decided. The latter
runs ahead under a lease, and while a verdict is on its way. What a round brings is in the trace: the next tokens'
ranks in the draft's order, or how far the n-gram match goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.simulator.policies import TARGET_ONLY, RoundFacts, SessionPolicy, Situation
from benchmarks.simulator.rounds import RequestTotals, RoundAtTarget, accepted_of, first_choices
from benchmarks.simulator.speculating import OutcomeDrafting
from benchmarks.simulator.trace import TracedRequest
from coordinator.policy.plan import Plan, Source
from coordinator.policy.prefetch import LAST_MS
from coordinator.sessions.draft import MAX_PENDING_TOKENS
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

if TYPE_CHECKING:
    from benchmarks.simulator.draft import DraftedSession
    from benchmarks.simulator.run import SimulatedServices


class SimulatedSession:
    """One request's rounds."""

    __slots__ = (
        "_agenda", "_asked_at", "_awaited", "_decided", "_draft", "_draft_ms", "_held", "_is_late", "_is_open", "_late",
        "_leased_until", "_missed", "_outcomes", "_patience", "_pending", "_plan", "_policy", "_round", "_situation",
        "_started", "_target", "_waiting", "_world", "at_target", "chances", "done", "drafting", "key", "matches",
        "prefill_left", "prompt_tokens", "ranks", "ready_at", "right", "round_rows", "tokens", "totals",
    )  # fmt: skip

    def __init__(self, key: int, request: TracedRequest, policy: SessionPolicy, world: SimulatedServices) -> None:
        self.key = key
        self.ranks, self.chances = request.ranks, request.chances
        self.matches, self.right = request.match_lengths, request.match_right
        self.tokens = request.tokens
        self.prompt_tokens = request.prompt_tokens
        self.prefill_left = request.prompt_tokens - 1
        self.done = self.at_target = 0
        self.round_rows = 1
        self.ready_at = 0.0
        self.drafting = False
        self.totals = RequestTotals(request.arrival_ms)
        self._world, self._agenda = world, world.agenda
        self._target, self._draft = world.target, world.draft
        self._policy = policy
        self._plan: Plan = TARGET_ONLY
        self._situation = Situation(
            position=place,
            room=min(room, MAX_PROPOSAL_NODES),
            match=self.matches[place],
            match_right=self.right[place],
            cached=cached,
            drafts=self._held is not None and not self._is_late,
            leased=leased,
            self_started=self_started,
            lease=max(0, min(room, self._world.lease)),
            first=not self.totals.rounds,
        )
        return self._situation

    def _choose(self, situation: Situation) -> None:
        self._plan = self._policy.plan(situation) if situation.room > 0 else TARGET_ONLY

    def _act(self, now: float) -> None:
        """Send what the plan needs: a round, unless the target has started it, and what the draft is to do."""
        plan, situation = self._plan, self._situation
        self._late = False
        self._draft_ms = 0.0
        started = situation.self_started or situation.leased > 0
        if plan.source is Source.WAIT and not started and self._held is not None:
            self._waiting, self._asked_at = True, now
            self._tell_draft(plan.depth)
            if plan.patience_ms < 1e9:
                self._patience += 1
                self._agenda.at(now + plan.patience_ms, self._lose_patience, self._patience)
            return
        if started:
            self._extend_lease(plan)
            self._round_left(self._started)
        else:
            self._send(plan.source, plan.depth, plan.nodes)

    def _send(self, source: Source, depth: int, nodes: int) -> None:
        plan, now = self._plan, self._agenda.now
        if source is Source.CACHED and self._situation.cached is not None:
            depth = nodes = min(nodes, len(self._situation.cached), self._situation.room)
        elif source is Source.NGRAM and not self._situation.match:
            source = Source.NONE
        if source is Source.NONE or not depth:
            source, depth, nodes = Source.NONE, 0, 0
        lease = plan.lease if source is Source.NONE else 0
        round_ = RoundAtTarget(self.done, source, depth, nodes, lease, now, fan_out=plan.fan_out)
        if lease:
            self._leased_until = self.done + lease + 1
        self._agenda.at(now + self._world.target_one_way_ms, self._at_target, round_)
        self._round_left(round_)

    def _at_target(self, round_: RoundAtTarget) -> None:
        self._round = round_
        self.round_rows = 1 + round_.nodes
        self.drafting = round_.fan_out > 0
        if not self.totals.rounds:
            self.ready_at = self._agenda.now
            self._target.open(self)
        else:
            self._target.submit(self)

    def _extend_lease(self, plan: Plan) -> None:
        """A lease is extended once half of it is left."""
        ahead = self._situation.leased - 1
        if plan.lease and not self._situation.self_started and ahead <= plan.lease // 2 < plan.lease:
            until = self.done + plan.lease
            self._leased_until = until + 1
            self._agenda.at(self._agenda.now + self._world.target_one_way_ms, self._lease_until, until)

    def _lease_until(self, until: int) -> None:
        """An extension has come; a lease that has run out meanwhile leaves the session waiting for its next round."""
        round_ = self._round
        left = until - round_.position
        if left <= round_.lease or round_.source is not Source.NONE:
            return
        if round_.committed:  # answered, and nothing follows: the target begins the next round now
            if self.at_target >= self.tokens or round_.next is not None:
                return
            follows = RoundAtTarget(self.at_target, Source.NONE, lease=max(0, left - 1), self_started=True)
            follows.sent = self._agenda.now
            round_.next = self._round = follows
            self.round_rows = 1
            self._target.submit(self)
        else:
            round_.lease = left

    def _round_left(self, round_: RoundAtTarget | None) -> None:
        """The round is on its way, or runs: the draft hears what was committed, and of outcomes to draft for."""
        plan = self._plan
        if self._held is None:
            return
        in_lease = self._situation.leased > 1 or plan.lease > 0
        must_leave = self._awaited or self._pending >= MAX_PENDING_TOKENS
        self._is_open = self._is_open or plan.fan_out > 0 or plan.shadow
        if self._pending and self._is_open and (not in_lease or must_leave):
            self._tell_draft(0)
        if plan.fan_out > 0 and round_ is not None:
            round_.fan_out = plan.fan_out
            self._announce(round_)

    def _tell_draft(self, wanted: int) -> None:
        self._pending, self._is_open = 0, True
        message = (
            self.done,
            min(wanted, self._situation.room),
            self._plan.least_chance if wanted else 0.0,
            self._plan.shadow,
        )
        self._agenda.at(self._agenda.now + self._world.draft_one_way_ms, self._at_draft, message)

    def _at_draft(self, message: tuple[int, int, float, bool]) -> None:
        if self._draft is not None and self._held is not None:
            self._draft.commit(self._held, *message)

    def _announce(self, round_: RoundAtTarget) -> None:
        """Have the draft prepare for a round's outcomes. What comes true is known here, and hidden from policies."""
        assert self._draft is not None and self._held is not None, "that is who drafts"
        plan, place = self._plan, round_.position
        own = round_.source is not Source.NGRAM
        accepted = min(round_.depth, self.right[place]) if not own else first_choices(self.ranks, place, round_.depth)
        after = place + accepted
        by_sibling = own and accepted_of(self.ranks, place, round_.depth, round_.nodes) > accepted
        rank = self.ranks[after] if after < self.tokens and not by_sibling else 0
        known = max(0, round_.depth - 1) if own else 0
        depth = min(plan.branch_depth, self._situation.room)
        self._outcomes = OutcomeDrafting(
            place, round_.depth, own, known, accepted, rank, plan.fan_out, depth, self.chances, self._draft.chance
        )
        self._agenda.at(self._agenda.now + self._world.draft_one_way_ms, self._verifying, self._outcomes)

    def _verifying(self, outcomes: OutcomeDrafting) -> None:
        held = self._held
        if self._draft is not None and held is not None and held.committed == outcomes.base:
            self._draft.verifying(held, outcomes)

    # What the draft says

    def proposal_leaves(self, base: int, tokens: int, draft_ms: float) -> None:
        """The draft sends a proposal behind so many committed tokens."""
        self._agenda.at(self._agenda.now + self._world.draft_one_way_ms, self._on_proposal, (base, tokens, draft_ms))

    def _on_proposal(self, drafted: tuple[int, int, float]) -> None:
        base, tokens, self._draft_ms = drafted
        self._is_late = False
        if not self._waiting or base != self.done:
            return
        self._waiting = False
        self._patience += 1
        beside = max(0, self._plan.nodes - self._plan.depth)
        self._send(Source.WAIT if tokens else Source.NONE, tokens, tokens + beside if tokens else 0)

    def _lose_patience(self, turn: int) -> None:
        if not self._waiting or turn != self._patience:
            return
        self._waiting, self._late, self._is_late = False, True, True
        depth = min(self._plan.depth, self._situation.room)
        self._policy.took_late(self._agenda.now - self._asked_at, self._plan.depth)
        self._send(Source.NGRAM if self._situation.match else Source.NONE, depth, depth)

    def shadow_leaves(self, first: int, end: int) -> None:
        """The draft says where committed tokens stood in its order."""
        if self._policy.learns:
            self._agenda.at(self._agenda.now + self._world.draft_one_way_ms, self._on_shadow, (first, end))

    def _on_shadow(self, positions: tuple[int, int]) -> None:
        first, end = positions
        self._is_late = False
        if self._held is not None:
            self._policy.took_shadow(self.ranks[first:end], self.chances[first:end])

    # What is counted

    def _count(self, round_: RoundAtTarget, now: float) -> None:
        totals = self.totals
        if not totals.rounds:
            totals.first_ms, totals.first_tokens = now, round_.committed
        totals.rounds += 1
        totals.tokens += round_.committed
        totals.self_started += round_.self_started
        if round_.depth:
            totals.drafted_rounds += 1
            totals.proposed += round_.depth
            totals.accepted += round_.accepted
            totals.hits += round_.source is Source.CACHED
        elif self._late:
            self._late = False
        if not round_.self_started and round_.sent > self._decided:
            totals.waited_ms += round_.sent - self._decided

    def _learn(self, round_: RoundAtTarget, now: float) -> None:
        sent = self._decided if round_.self_started else round_.sent
        draft_wait_ms = max(0.0, sent - self._decided)
        service_ms = round_.queue_ms + round_.step_ms
        facts = RoundFacts(
            position=round_.position,
            round_ms=now - self._decided,
            draft_wait_ms=draft_wait_ms,
            wire_ms=max(0.0, now - sent - service_ms),
            queue_ms=round_.queue_ms,
            step_ms=round_.step_ms,
            rows=round_.rows,
            sessions=round_.sessions,
            proposed=round_.depth,
            nodes=round_.nodes,
            accepted=round_.accepted,
            by_match=round_.source is Source.NGRAM,
            hit=round_.source is Source.CACHED,
            missed=self._missed and not round_.depth,
            self_started=round_.self_started,
            draft_ms=self._draft_ms,
            draft_rows=self._draft.rows if self._draft is not None else 0,
            late=self._late,
        )
        self._policy.learn(self._plan, facts)

    def _end(self, now: float) -> None:
        self.totals.end_ms = now
        if self._draft is not None and self._held is not None:
            self._draft.close(self._held)
            self._held = None
        self._policy.close()
        self._world.ended()
