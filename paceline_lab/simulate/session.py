"""A simulated request: `coordinator/round.py` on the virtual clock, with its session on the target and on the draft.

`done` counts tokens that the coordinator has committed, `at_target` those that the target has decided. The latter
runs ahead under a lease, and while a verdict is on its way. What a round brings is in the trace: the next tokens'
ranks in the draft's order, or how far the n-gram match goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.policy.plan import Plan, Source
from coordinator.policy.prefetch import LAST_MS
from coordinator.sessions.round_draft import MAX_PENDING_TOKENS
from paceline.protocol.proposal import MAX_PROPOSAL_NODES
from paceline_lab.simulate.placed import PlacedSession
from paceline_lab.simulate.policies import TARGET_ONLY, RoundFacts, Situation
from paceline_lab.simulate.rounds import RoundAtTarget
from paceline_lab.simulate.speculating import OutcomeDrafting
from paceline_lab.simulate.trace import TracedRequest
from paceline_lab.simulate.trees import NO_TREE, Growth, ProposedTree, chain

if TYPE_CHECKING:
    from paceline_lab.simulate.coordinator import CoordinatorProcess
    from paceline_lab.simulate.services import SimulatedServices


class SimulatedSession(PlacedSession):
    """One request's rounds."""

    __slots__ = (
        "_asked_at", "_awaited", "_decided", "_draft_ms", "_is_late", "_is_open", "_late", "_leased_until", "_missed",
        "_outcomes", "_patience", "_pending", "_plan", "_round", "_situation", "_started", "_waiting", "chances",
        "drafting", "matches", "ranks", "ready_at", "right", "round_rows",
    )  # fmt: skip

    def __init__(self, key: int, request: TracedRequest, home: CoordinatorProcess, world: SimulatedServices) -> None:
        super().__init__(key, request, home, world)
        self.ranks, self.chances = request.ranks, request.chances
        self.matches, self.right = request.match_lengths, request.match_right
        self.round_rows = 1
        self.ready_at = 0.0
        self.drafting = False
        self._plan: Plan = TARGET_ONLY
        self._situation = Situation()
        self._round = RoundAtTarget(0, Source.NONE)
        self._started: RoundAtTarget | None = None
        self._outcomes: OutcomeDrafting | None = None
        self._waiting = False
        self._asked_at = self._decided = self._draft_ms = 0.0
        self._pending = self._patience = self._leased_until = 0
        self._missed = self._late = self._is_late = self._awaited = self._is_open = False

    def arrive(self, _: None) -> None:
        """The request has come: plan its first round and open its sessions."""
        now = self._decided = self.totals.arrival_ms = self._agenda.now
        home = self._home
        if not home.has_room or not self._place_target():
            self._refuse()
            return
        home.sessions[self.key] = self
        self._policy = self._world.session_policy(home)
        self._place_draft()
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
        self._agenda.at(self._target_route.back.arrives(), self._on_verdict, round_)
        if position >= self.tokens:
            return False
        follows = self._prefetched(round_, now)
        if follows is None and round_.lease > 0 and round_.source is Source.NONE:
            follows = RoundAtTarget(position, Source.NONE, lease=round_.lease - 1)
        if follows is None:
            return False
        follows.self_started, follows.sent, follows.life = True, now, self.lives
        round_.next = self._round = follows
        self.round_rows = 1 + follows.nodes
        return True

    def _decide(self, round_: RoundAtTarget) -> None:
        position = round_.position
        round_.accepted = accepted = round_.last_accepted(self.ranks, self.right)[1]
        round_.committed = min(accepted + 1, self.tokens - position)

    def _prefetched(self, round_: RoundAtTarget, now: float) -> RoundAtTarget | None:
        """The round that a prefetched proposal starts, if what was left with the target fits the outcome."""
        if not self._world.layout.max_prefetched:
            return None
        position = round_.position + round_.committed
        room = self.tokens - position - 1
        copied = self._copied_behind(round_, room)
        if copied:
            return RoundAtTarget(position, Source.NGRAM, chain(copied))
        outcomes = self._outcomes
        if not round_.fan_out or outcomes is None or outcomes.base != round_.position:
            return None
        came = now - self._target_route.ms - self._draft_ms_away - LAST_MS
        drafted = outcomes.drafted(came, room)
        nodes = self._policy.worth(drafted, self._chances_from(position)) if drafted else 0
        if not nodes or drafted is None:
            return None
        return RoundAtTarget(position, Source.CACHED, drafted.first(nodes), fan_out=round_.fan_out)

    def _copied_behind(self, round_: RoundAtTarget, room: int) -> int:
        """Tokens of the match behind a round that went as the match said, and one token more."""
        position, k = round_.position, round_.depth if round_.source is Source.NGRAM else 0
        length = self.matches[position]
        if not length or room <= 0 or (round_.depth and not k) or self.right[position] < k + 1:
            return 0
        if self.done != position or self._decided + self._target_route.ms > self._agenda.now:
            return 0  # the coordinator is not so far that it could have left anything with the target
        return min(room, self._policy.copied(length, k, room))

    @property
    def _draft_ms_away(self) -> float:
        return self._draft_route.ms if self._draft_route is not None else 0.0

    # What the coordinator does

    def _on_verdict(self, round_: RoundAtTarget) -> None:
        """A verdict has come: the coordinator's own work comes first, one session after the other."""
        if round_.life != self.lives:
            return
        self._agenda.at(self._home.free_at(), self._settle, round_)

    def _settle(self, round_: RoundAtTarget) -> None:
        if round_.life != self.lives:
            return
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
        if self._held is None and self._world.drafts:
            self._place_draft()
        cached = self._prepared(round_, now)
        if not self._is_placed:
            self._is_placed = True
            self._policy.placed(self._target, self._draft)
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

    def _prepared(self, round_: RoundAtTarget, now: float) -> ProposedTree | None:
        """What was drafted for the outcome, as far as it is here; None: nothing."""
        outcomes, self._outcomes = self._outcomes, None
        self._missed = False
        if outcomes is None or outcomes.base != round_.position:
            return None
        drafted = outcomes.drafted(now - self._draft_ms_away, self.tokens - self.done)
        self._missed = drafted is None
        return drafted

    def _chances_from(self, position: int) -> tuple[float, ...]:
        return self.chances[position : position + MAX_PROPOSAL_NODES]

    def _situation_now(self, cached: ProposedTree | None, self_started: bool, leased: int) -> Situation:
        place, room = self.done, self.tokens - self.done - 1
        self._situation = Situation(
            position=place,
            room=min(room, MAX_PROPOSAL_NODES),
            match=self.matches[place],
            match_right=self.right[place],
            cached=cached,
            chances=self._chances_from(place) if cached else (),
            drafts=self._held is not None and not self._is_late,
            leased=leased,
            self_started=self_started,
            lease=max(0, min(room, self._world.layout.lease)),
            first=not self.totals.rounds,
            lag=self._draft_lag,
            open_ms=self._agenda.now - self._draft_opened,
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
            self._send(plan.source, self._planned_tree(plan))

    def _planned_tree(self, plan: Plan) -> ProposedTree:
        """What a plan proposes that waits for nothing."""
        situation = self._situation
        if plan.source is Source.CACHED and situation.cached is not None:
            return situation.cached.within(situation.room).first(plan.nodes)
        return chain(plan.depth) if plan.source is Source.NGRAM and situation.match else NO_TREE

    def _send(self, source: Source, tree: ProposedTree) -> None:
        plan, now = self._plan, self._agenda.now
        source = source if tree else Source.NONE
        lease = plan.lease if source is Source.NONE else 0
        round_ = RoundAtTarget(self.done, source, tree, lease, now, fan_out=plan.fan_out, life=self.lives)
        if lease:
            self._leased_until = self.done + lease + 1
        self._agenda.at(self._target_route.there.arrives(), self._at_target, round_)
        self._round_left(round_)

    def _at_target(self, round_: RoundAtTarget) -> None:
        if round_.life != self.lives:
            return
        self._round = round_
        self.round_rows = 1 + round_.nodes
        self.drafting = round_.fan_out > 0
        if not self._is_at_target:
            self.ready_at = self._agenda.now
            self._is_at_target = self._target.open(self)
            if not self._is_at_target:
                self._turned_away()
        else:
            self._target.submit(self)

    def _extend_lease(self, plan: Plan) -> None:
        """A lease is extended once half of it is left."""
        ahead = self._situation.leased - 1
        if plan.lease and not self._situation.self_started and ahead <= plan.lease // 2 < plan.lease:
            until = self.done + plan.lease
            self._leased_until = until + 1
            self._agenda.at(self._target_route.there.arrives(), self._lease_until, until)

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
            follows.sent, follows.life = self._agenda.now, self.lives
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
        if self._draft_route is not None:
            self._agenda.at(self._draft_route.there.arrives(), self._at_draft, message)

    def _at_draft(self, message: tuple[int, int, float, bool]) -> None:
        if self._draft is not None and self._held is not None:
            self._draft.commit(self._held, *message)

    def _announce(self, round_: RoundAtTarget) -> None:
        """Have the draft prepare for a round's outcomes. What comes true is known here, and hidden from policies."""
        assert self._draft is not None and self._draft_route is not None, "that is who drafts"
        plan, own = self._plan, round_.source is not Source.NGRAM
        true_node, accepted = round_.last_accepted(self.ranks, self.right)
        after = round_.position + accepted
        rank = self.ranks[after] if after < self.tokens else 0
        depth = min(plan.branch_depth, self._situation.room)
        self._outcomes = OutcomeDrafting(
            round_.position, round_.tree, own, true_node, rank, plan.fan_out, depth,
            min(plan.branch_nodes, MAX_PROPOSAL_NODES), self.chances, self._draft.chance,
        )  # fmt: skip
        self._agenda.at(self._draft_route.there.arrives(), self._verifying, self._outcomes)

    def _verifying(self, outcomes: OutcomeDrafting) -> None:
        held = self._held
        if self._draft is not None and held is not None:
            self._draft.verifying(held, outcomes)

    # What the draft says

    def proposal_leaves(self, base: int, tokens: int, draft_ms: float) -> None:
        """The draft sends a proposal behind so many committed tokens."""
        assert self._draft_route is not None, "that is where it comes from"
        self._agenda.at(self._draft_route.back.arrives(), self._on_proposal, (base, tokens, draft_ms))

    def _on_proposal(self, drafted: tuple[int, int, float]) -> None:
        base, tokens, self._draft_ms = drafted
        self._is_late, self._draft_lag = False, 0
        if not self._waiting or base != self.done:
            return
        self._waiting = False
        self._patience += 1
        nodes = tokens + max(0, self._plan.nodes - self._plan.depth)
        self._send(Source.WAIT, Growth(self.chances, base, tokens, nodes).grown(tokens) if tokens else NO_TREE)

    def _lose_patience(self, turn: int) -> None:
        if not self._waiting or turn != self._patience:
            return
        self._waiting, self._late, self._is_late = False, True, True
        depth = min(self._plan.depth, self._situation.room)
        self._policy.took_late(self._agenda.now - self._asked_at, self._plan.depth)
        self._send(Source.NGRAM, chain(depth) if self._situation.match else NO_TREE)

    def shadow_leaves(self, first: int, end: int) -> None:
        """The draft says where committed tokens stood in its order."""
        if self._policy.learns:
            assert self._draft_route is not None, "that is where it comes from"
            self._agenda.at(self._draft_route.back.arrives(), self._on_shadow, (first, end))

    def _on_shadow(self, positions: tuple[int, int]) -> None:
        first, end = positions
        self._is_late, self._draft_lag = False, 0
        if self._held is not None:
            self._policy.took_shadow(self.ranks[first:end], self.chances[first:end])

    # What is counted

    def _count(self, round_: RoundAtTarget, now: float) -> None:
        self.totals.count(round_, now, self._decided)
        self._late = self._late and round_.depth > 0
        if self._world.tally is not None:
            self._world.tally(now, round_.committed)

    def _learn(self, round_: RoundAtTarget, now: float) -> None:
        draft_rows = self._draft.rows if self._draft is not None else 0
        missed = self._missed and not round_.depth
        facts = RoundFacts.of(round_, self._decided, now, self._draft_ms, draft_rows, missed=missed, late=self._late)
        self._policy.learn(self._plan, facts)

    def _end(self, now: float) -> None:
        self.totals.end_ms = now
        if self._draft is not None and self._held is not None:
            self._draft.close(self._held)
            self._held = None
        self._policy.close()
        self._home.sessions.pop(self.key, None)
        self._world.ended(self.totals)

    # What goes wrong

    def _begin_anew(self) -> None:
        self._patience += 1
        self._waiting, self._started, self._outcomes = False, None, None
        self._leased_until = 0
        self._decided = self._agenda.now
        self._is_placed = False
        self._choose(self._situation_now(None, False, 0))
        self._act(self._agenda.now)

    def _without_draft(self, life: int) -> None:
        self._outcomes = None
        if self._waiting and life == self.lives and self._held is None:
            self._lose_patience(self._patience)
