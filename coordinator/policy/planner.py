"""How much to draft, and with what: the greatest goodput by what is measured. Pure.

Each request follows the best way to run rounds (`cycles`): its rate says what time is worth, and so which tokens of
which proposal are worth theirs (`market`). One account bounds what being wrong may cost (`account`). A round without
a proposal need not be sent: under a lease the target starts it by itself. Rejection and block acceptance see averages
by depth only, never the probability of a token that might be dropped (`exactness` §7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from coordinator.policy.account import Account
from coordinator.policy.cycles import Cycle, Cycles, Way
from coordinator.policy.explaining import explained
from coordinator.policy.market import MESSAGE_MS, NOTHING, Choice, Market, Rates
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from coordinator.policy.seen import MAX_DEPTH, Seen
from coordinator.sessions.round_draft import MAX_PENDING_TOKENS
from paceline.costs.service_costs import DEFAULT, UNKNOWN_LINE, DraftCosts, TargetCosts
from paceline.protocol.draft import Shadow
from paceline.protocol.explanation import PlanExplanation
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.records import RoundRecord
from paceline.sampling.match import Match

SHADOW_SHARE = 0.02
"""Most of the time that drafts are at work for shadow alone, all together: their cores may be the target's. No
account counts it, so it stays below what an account allows (`ALLOWED_SHARE`)."""
RATES_KEPT = 8
"""Rounds for which a request's rates are kept once it has run as many: chances hardly move meanwhile."""


class TargetPeerCosts(Protocol):
    """A target that says what its steps take."""

    @property
    def costs(self) -> TargetCosts:
        """Now."""


class DraftPeerCosts(Protocol):
    """A draft service that says what its steps take."""

    @property
    def costs(self) -> DraftCosts:
        """Now."""


class Planner:
    """What a coordinator's requests share: what rounds take at each peer, and what is known of each drafter."""

    def __init__(self) -> None:
        self._targets: WeakKeyDictionary[Any, TargetTimes] = WeakKeyDictionary()
        self._drafts: WeakKeyDictionary[Any, dict[str, DraftTimes]] = WeakKeyDictionary()
        self._seen: dict[tuple[str, Acceptance, bool], Seen] = {}

    def target(self, peer: TargetPeerCosts) -> TargetTimes:
        """What rounds take at a target."""
        if peer not in self._targets:
            held = ref(peer)  # the times of a peer that has gone go with it
            self._targets[peer] = TargetTimes(lambda: found.costs if (found := held()) else TargetCosts())
        return self._targets[peer]

    def draft(self, peer: DraftPeerCosts, drafter: str = DEFAULT) -> DraftTimes:
        """What drafts of one of its drafters take at a draft service."""
        times = self._drafts.setdefault(peer, {})
        if drafter not in times:
            held = ref(peer)
            times[drafter] = DraftTimes(lambda: found.costs.line_of(drafter) if (found := held()) else UNKNOWN_LINE)
        return times[drafter]

    @property
    def some_target(self) -> TargetTimes | None:
        """What rounds take at one of the targets, for what is to be known before a request has its own."""
        return next((times for times in self._targets.values() if times.is_known), None)

    def seen(self, drafter: str, acceptance: Acceptance, *, greedy: bool) -> Seen:
        """What is known of a drafter, with its model; greedy and sampled texts differ too much to share."""
        return self._seen.setdefault((drafter, acceptance, greedy), Seen())


class RequestPlanner:
    """Plans one request's rounds and learns from what became of them."""

    def __init__(self, planner: Planner, drafter: str, acceptance: Acceptance, *, greedy: bool) -> None:
        self._coupled = acceptance is Acceptance.COUPLED
        self._greedy = greedy
        self._planner = planner
        self._acceptance = acceptance
        self._drafter = drafter
        self._pool = planner.seen(drafter, acceptance, greedy=greedy)
        self._seen = self._pool.child()
        self._left: dict[str, Seen] = {}
        """What the request knows of the drafters that it has left."""
        self._peers: tuple[TargetPeerCosts | None, DraftPeerCosts | None] = None, None
        """Held as long as their times are read."""
        self._target: TargetTimes | None = None
        self._draft: DraftTimes | None = None
        self._rates = Rates()
        self._account = Account()
        self._chosen: Counter[Way] = Counter()
        self._leases = False
        """Whether the target may start rounds by itself: then a round that is sent costs that, too."""
        self._rounds = 0
        self._run = self._shadowed = 0
        """Consecutive positions up to the last one whose token was the draft's first choice; and that one's end."""
        self._closed = False
        self._drafted_ahead = False
        self.reads_features = False
        """Whether the drafter reads the target's hidden states: the shadow of committed tokens, whose features are
        the target's, then says nothing of depths that are drafted on the drafter's own."""

    @property
    def target(self) -> TargetTimes | None:
        """What rounds take where the request is; before it is anywhere, at some target."""
        return self._target or self._planner.some_target

    def seen_of(self, drafter: str) -> Seen:
        """What the request knows of a drafter, or else what all requests do."""
        if drafter == self._drafter:
            return self._seen
        return self._left.get(drafter) or self._planner.seen(drafter, self._acceptance, greedy=self._greedy)

    def hoped_of(self, drafter: str) -> Seen:
        """What the request may hope for of a drafter: the less any request has tried it, the more."""
        tried = self._planner.seen(drafter, self._acceptance, greedy=self._greedy).positions
        return self.seen_of(drafter).hoped(tried)

    def draft_with(self, drafter: str) -> None:
        """Another drafter's tokens are planned with and learned of from now on; what is known of the texts stays."""
        self._left[self._drafter] = before = self._seen
        pool = self._planner.seen(drafter, self._acceptance, greedy=self._greedy)
        pool.texts = self._pool.texts
        self._drafter, self._pool = drafter, pool
        self._seen = self._left.pop(drafter) if drafter in self._left else pool.child()
        self._seen.texts = before.texts
        self._run = self._shadowed = 0

    def move(self, target: TargetPeerCosts | None, draft: DraftPeerCosts | None, drafter: str = DEFAULT) -> None:
        """The request's sessions are at these peers now, the draft's with one of its drafters."""
        self._peers = target, draft
        found = None if target is None else self._planner.target(target)
        if found is not self._target:
            for times, change in ((self._target, -1), (found, 1)):
                if times is not None:
                    times.running += change
            self._target = found
        self._draft = None if draft is None else self._planner.draft(draft, drafter)

    def close(self) -> None:
        """The request has ended; what it knew can still be explained."""
        if self._target is not None and not self._closed:
            self._target.running -= 1
        self._closed = True

    @property
    def expects_drafts(self) -> bool:
        """Whether drafting was to pay when the last request began; then the draft computes the prompt at once."""
        return self._pool.pays

    def plan(self, options: Options) -> Plan:
        """What the next round should do."""
        if self._drafted_ahead:
            for seen in self._both:
                seen.take_ahead(options.cached)
        target, self._leases = self._target, options.lease > 0
        if options.room <= 0 or target is None:
            plan = Plan()
        elif not target.is_known:
            plan = Plan(lease=options.lease)
        else:
            plan = self._best(target, options)
        self._drafted_ahead = plan.fan_out > 0
        return plan

    def worth_verifying(self, proposal: Proposal) -> Proposal | None:
        """The first nodes of a model's proposal that are worth their rows if its outcome comes true."""
        market = self._market
        nodes = market.drafted(proposal)[1] if market else 0
        return proposal.first(nodes) if nodes else None

    def worth_copying(self, match: Match | None, room: int) -> int:
        """How far to follow a match; None: there is none."""
        market = self._market
        return market.copied(match, room)[1] if market and match else 0

    def worth_prefetching(self, match: Match, room: int) -> int:
        """How far to follow a match behind its next token, which must come first; 0: not worth the message."""
        market, behind = self._market, match.advance(1)
        if market is None or behind is None:
            return 0
        value, nodes = market.copied(behind, room)
        return nodes if self._seen.texts.ngrams.reached(match, 1)[0] * value > self._rates.own * MESSAGE_MS else 0

    def verdict_due_ms(self, nodes: int, *, sent: bool) -> float:
        """From when on what leaves for the target is expected to come too late for a round's verdict.

        Counted from when the round was sent, or else from the verdict with which the target started it.
        """
        if self._target is None:
            return 0.0
        step_ms = self._target.step_ms(1 + self._rates.around.rows + nodes)
        return step_ms if sent else max(0.0, step_ms - self._target.sent.value)

    def take_shadow(self, shadow: Shadow) -> None:
        """The draft says where committed tokens stood in its order, whether it proposed them or not."""
        if shadow.first_position != self._shadowed:
            self._run = 0
        self._shadowed = shadow.end
        for rank, q in zip(shadow.ranks, shadow.probabilities, strict=True):
            for seen in self._both:
                if self._coupled:
                    seen.take_rank(rank, q, self._run)
                else:
                    # Greedy texts leave no doubt; of a sampled one q is what acceptance is at the least (Σ pq).
                    seen.take_average(float(rank == 1) if self._greedy else q)
            self._run = self._run + 1 if rank == 1 and not self.reads_features else 0

    def take_match(self, match: Match | None, committed: Sequence[int]) -> None:
        """Compare the match that stood (None: there was none) with what was committed then, proposed or not."""
        for seen in self._both:
            seen.texts.ngrams.learn(match, committed)

    def take_late(self, waited_ms: float, depth: int) -> None:
        """A round waited so long for a proposal that did not come."""
        if self._draft is not None:
            self._draft.learn_late(waited_ms, depth)

    def learn(
        self,
        plan: Plan,
        record: RoundRecord,
        proposal: Proposal | None,
        path: Sequence[int],
        *,
        first_draft: bool = False,
    ) -> None:
        """Take in what a round cost and what became of its proposal; `path` holds the accepted nodes.

        A request's first round is not to be learned from: it waits for the prompt. Nor is the wait for the first
        draft (`first_draft`), for which the draft service computed the whole text: others cost less.
        """
        self._rounds += 1
        self._pool.texts.elapsed_ms += record.round_ms
        for seen in self._both:
            seen.texts.take_round(plan.source, record)
        if self._target is None:
            return
        waited = plan.source is Source.WAIT
        self._target.learn(record, beside=plan.fan_out > 0, late=waited)
        if waited and proposal is not None and not first_draft and self._draft is not None:
            self._draft.learn(record)
        if proposal is not None and plan.source is not Source.NGRAM and (self.reads_features or not self._coupled):
            for seen in self._both:
                seen.take_proposal(proposal, path, first=1 if self._coupled else 0)
        self._book(self._target, plan, record, proposal)

    def explain(self) -> PlanExplanation:
        """Why the request was drafted for as it was."""
        if self._target is None:
            return PlanExplanation()
        cycles = Cycles(self._target, self._draft, self._seen, can_ahead=self._draft is not None)
        return explained(cycles, self._rates.around, self._chosen, self._account, self._seen.positions)

    def _book(self, target: TargetTimes, plan: Plan, record: RoundRecord, proposal: Proposal | None) -> None:
        proposed = len(proposal) if proposal is not None else 0
        ahead = self._rates.around.ahead
        token_ms = target.without_ms(record, proposed, beside=plan.fan_out > 0, others_beside=ahead)
        if not self._leases:
            token_ms += target.sent.value
        if record.self_started and proposal is None and not plan.fan_out:
            self._account.pass_by(record.round_ms, token_ms)
            return
        committed = record.accepted + 1
        most_ms = record.draft_wait_ms + (committed + 1) * token_ms  # a pause of the machine is no one's price
        self._account.add(min(record.round_ms, most_ms), committed, token_ms)

    @property
    def _both(self) -> tuple[Seen, Seen]:
        return self._seen, self._pool

    @property
    def _market(self) -> Market | None:
        return None if self._target is None else self._market_on(self._target)

    def _market_on(self, target: TargetTimes) -> Market:
        return Market(target, self._draft, self._seen, self._rates, coupled=self._coupled)

    def _best(self, target: TargetTimes, options: Options) -> Plan:
        if self._rounds <= RATES_KEPT or self._rounds % RATES_KEPT == 0:
            self._rates = self._rates_now(target, options)
        market = self._market_on(target)
        self._account.expect(options.room, target.step_ms(1 + self._rates.around.rows))
        if options.leased > 1:
            return self._running_on(market, options)
        fan_out, branch = self._ahead(market, options)
        nodes = market.tree_nodes(branch, options)
        if options.self_started:
            return Plan(fan_out=fan_out, branch_depth=branch, branch_nodes=nodes)
        chosen = self._choice(market, options)
        owed = self._account.rounds_until(chosen.risk_ms)
        # A round that drafts ahead has to be sent, too, whether it proposes anything or not.
        if owed or chosen.value <= (-market.sending(options) if fan_out else 0.0):
            chosen = NOTHING
        if chosen is NOTHING and not fan_out:
            return self._resting(market, options, owed)
        plan = chosen.plan
        self._chosen[Way(plan.source, plan.depth, ahead=fan_out > 0)] += 1
        if plan.source is Source.WAIT:
            plan = market.open_ended(plan, options.room, self._account.left_ms)
        if options.leased:
            plan = Plan()
        return replace(plan, fan_out=fan_out, branch_depth=branch, branch_nodes=nodes) if fan_out else plan

    def _running_on(self, market: Market, options: Options) -> Plan:
        """The target starts the next round by itself, and the one behind it: there is nothing to choose."""
        self._chosen[Way()] += 1
        self._take_match(market.match(options))
        return Plan(shadow=options.drafts and self._may_shadow(options))

    def _rates_now(self, target: TargetTimes, options: Options) -> Rates:
        """The rates of the best way, where the others do what is best for all."""
        draft = self._draft if options.drafts else None
        most, can_ahead = min(options.room, MAX_DEPTH), options.fan_out > 0
        around = Cycles(target, draft, self._pool, most, can_ahead=can_ahead).balanced(target.sessions)
        step_ms, slowed = target.steps(), target.slowed(around.rows + 1)
        alone_ms = step_ms(around.rows + 1)

        def net_rate(cycle: Cycle) -> float:
            lost = around.rate * (step_ms(around.rows + cycle.way.rows) - alone_ms + slowed * cycle.draft_ms)
            return (cycle.tokens - lost) / cycle.ms if cycle.ms > 0 else 0.0

        best = max(Cycles(target, draft, self._seen, most, can_ahead=can_ahead).all(around), key=net_rate)
        if draft is not None and not self._rounds and options.room >= MAX_DEPTH:
            # What the request knows is still what all do; later on, late or near its end, it speaks for itself alone.
            self._pool.pays = best.way.source is not Source.NONE
        # A draft at work beside the step slows it for all, so only all together choose that. Where they do, a wait
        # for the draft disturbs nobody any more.
        ahead = best.way.ahead if target.sessions == 1 else around.ahead
        disturbed = 0.0 if around.ahead else around.rate * slowed
        return Rates(net_rate(best), disturbed, around, ahead)

    def _choice(self, market: Market, options: Options) -> Choice:
        """The proposal of greatest value, which may be below 0, as far as there is any."""
        match = market.match(options)
        self._take_match(match)
        found = (match, market.cached(options), market.wait(options, self._account.left_ms))
        there = [choice for choice in found if choice.plan.source is not Source.NONE]
        return max(there, key=lambda choice: choice.value, default=NOTHING)

    def _take_match(self, match: Choice) -> None:
        for seen in self._both:
            seen.texts.copied.add(max(0.0, match.value))

    def _ahead(self, market: Market, options: Options) -> tuple[int, int]:
        """Fan-out and depth of outcome drafting."""
        if not options.drafts or not options.fan_out or not self._rates.ahead:
            return 0, 0
        around = self._rates.around
        slower_ms = market.target.step_ms(1 + around.rows, beside=True) - market.target.step_ms(1 + around.rows)
        if self._account.rounds_until(0.0 if around.ahead else slower_ms):
            return 0, 0
        depth = market.usual_depth(options.room)
        return (options.fan_out, depth) if depth else (0, 0)

    def _resting(self, market: Market, options: Options, owed: int) -> Plan:
        """Target-only, under a lease: a run that ends when the account has recovered, or a match or the draft is due.

        What a round of the run saves is its way; what it may miss is what a match has been worth on average.
        """
        self._chosen[Way()] += 1
        missed = 0.0 if options.can_prefetch else self._seen.texts.copied.value
        lease = owed or options.lease
        if missed > 0:
            lease = int(min(lease, 2 * market.sending(options) / missed))
        if self._draft is not None and options.drafts and options.lag and options.open_ms:
            step_ms = market.target.step_ms(1 + self._rates.around.rows)
            lease = int(min(lease, self._draft.catch_up_ms(options.lag, options.open_ms) / step_ms))
        return Plan(lease=min(options.lease, lease), shadow=options.drafts and self._may_shadow(options))

    def _may_shadow(self, options: Options) -> bool:
        """Whether the draft may be at work for shadow alone: for a token's share of what it is told at once.

        A session that isn't open has the whole text to compute first.
        """
        if self._draft is None:
            return False
        opening_ms = 0.0 if options.open_ms else self._draft.step_ms(options.lag)
        cost_ms = self._draft.step_ms(MAX_PENDING_TOKENS) / MAX_PENDING_TOKENS + opening_ms
        texts = self._pool.texts
        if texts.shadow_ms + cost_ms > SHADOW_SHARE * texts.elapsed_ms:
            return False
        texts.shadow_ms += cost_ms
        return True
