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
    from benchmarks.simulator.services import SimulatedServices


class SimulatedSession:
    """One request's rounds."""

    __slots__ = (
        "_agenda", "_asked_at", "_awaited", "_decided", "_draft", "_draft_ms", "_held", "_is_late", "_is_open",
        "_late", "_leased_until", "_missed", "_outcomes", "_patience", "_pending", "_plan", "_policy", "_round",
        "_situation", "_started", "_target", "_waiting", "_world", "at_target", "chances", "done", "drafting", "key",
        "matches", "prefill_left", "prompt_tokens", "ranks", "ready_at", "right", "round_rows", "tokens", "totals",
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
        self._situation = Situation()
        self._round = RoundAtTarget(0, Source.NONE)
        self._started: RoundAtTarget | None = None
        self._held: DraftedSession | None = None
        self._outcomes: OutcomeDrafting | None = None
        self._waiting = False
        self._asked_at = self._decided = self._draft_ms = 0.0
        self._pending = self._patience = self._leased_until = 0
        self._missed = self._late = self._is_late = self._awaited = self._is_open = False

    def arrive(self, _: None) -> None:
        """The request has come: plan its first round and open its sessions."""
        now = self._decided = self.totals.arrival_ms = self._agenda.now
        if self._draft is not None:
            self._held = self._draft.open(self)
        self._choose(self._situation_now(None, False, 0))
        self._act(now)

    # What the target does

    def answered(self, begun: float, step_ms: float, sessions: int, rows: int) -> bool:
        """The target's step with this session's round is done; says whether it goes on by itself."""
        round_, now = self._round, self._agenda.now
        self._decide(round_)
        round_.begun, round_.queue_ms, round_.step_ms = begun, begun - self.ready_at, step_ms
        round_.rows, round_.sessions = rows, sessions
        self.at_target = position = round_.position + round_.committed
        self._agenda.at(now + self._world.target_one_way_ms, self._on_verdict, round_)
        if position >= self.tokens:
            return False
        follows = self._prefetched(round_, now)
        if follows is None and round_.lease > 0 and round_.source is Source.NONE:
            follows = RoundAtTarget(position, Source.NONE, lease=round_.lease - 1)
        if follows is None:
            return False
        follows.self_started, follows.sent = True, now
        round_.next = self._round = follows
        self.round_rows = 1 + follows.nodes
        return True

    def _decide(self, round_: RoundAtTarget) -> None:
        position, depth = round_.position, round_.depth
        accepted = 0
        if round_.source is Source.NGRAM:
            accepted = min(depth, self.right[position])
        elif depth:
            accepted = accepted_of(self.ranks, position, depth, round_.nodes)
        round_.accepted = accepted
        round_.committed = min(accepted + 1, self.tokens - position)

    def _prefetched(self, round_: RoundAtTarget, now: float) -> RoundAtTarget | None:
        """The round that a prefetched proposal starts, if what was left with the target fits the outcome."""
        if not self._world.max_prefetched:
            return None
        position = round_.position + round_.committed
        room = self.tokens - position - 1
        copied = self._copied_behind(round_, room)
        if copied:
            return RoundAtTarget(position, Source.NGRAM, copied, copied)
        outcomes = self._outcomes
        if not round_.fan_out or outcomes is None or outcomes.base != round_.position:
            return None
        came = now - self._world.target_one_way_ms - self._world.draft_one_way_ms - LAST_MS
        drafted = sum(at <= came for at in outcomes.grown)
        drafted = min(drafted, room)
        drafted = self._policy.worth(self.chances[position : position + drafted]) if drafted > 0 else 0
        if not drafted:
            return None
        return RoundAtTarget(position, Source.CACHED, drafted, drafted, fan_out=round_.fan_out)

    def _copied_behind(self, round_: RoundAtTarget, room: int) -> int:
        """Tokens of the match behind a round that went as the match said, and one token more."""
        position, k = round_.position, round_.depth if round_.source is Source.NGRAM else 0
        length = self.matches[position]
        if not length or room <= 0 or (round_.depth and not k) or self.right[position] < k + 1:
            return 0
        if self.done != position or self._decided + self._world.target_one_way_ms > self._agenda.now:
            return 0  # the coordinator is not so far that it could have left anything with the target
        return min(room, self._policy.copied(length, k, room))

    # What the coordinator does

    def _on_verdict(self, round_: RoundAtTarget) -> None:
        """A verdict has come: the coordinator's own work comes first, one session after the other."""
        self._agenda.at(self._world.coordinator_free(), self._settle, round_)

    def _settle(self, round_: RoundAtTarget) -> None:
        now = self._agenda.now
        self.done = round_.position + round_.committed
        self._count(round_, now)
        learns = self._policy.learns
        if learns and self.totals.rounds > 1:
            self._learn(round_, now)
        if self.done >= self.tokens:
            self._end(now)
            return
        self._decided = now
        cached = self._prepared(round_, now)
        if learns:
            self._policy.took_match(self._situation, round_.committed)
        self._pending += round_.committed
        self._awaited = self._plan.fan_out > 0
        self._started = round_.next
        prefetched = round_.next is not None and round_.next.depth > 0
        if prefetched:
            self._leased_until = 0
        leased = max(0, self._leased_until - self.done)
        self._choose(self._situation_now(cached, prefetched, leased))
        self._act(now)

    def _prepared(self, round_: RoundAtTarget, now: float) -> tuple[float, ...] | None:
        """What was drafted for the outcome, as far as it is here; None: nothing."""
        outcomes, self._outcomes = self._outcomes, None
        self._missed = False
        if outcomes is None or outcomes.base != round_.position:
            return None
        came = now - self._world.draft_one_way_ms
        drafted = min(sum(at <= came for at in outcomes.grown), self.tokens - self.done)
        self._missed = not drafted
        return self.chances[self.done : self.done + drafted] if drafted else None

    def _situation_now(self, cached: tuple[float, ...] | None, self_started: bool, leased: int) -> Situation:
        place, room = self.done, self.tokens - self.done - 1
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
