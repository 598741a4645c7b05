"""How much to draft, and with what: the greatest goodput by what is measured. Pure.

Each request follows the best strategy (`cycles`). The rate of that strategy is the worth of time, which decides which
tokens of which proposal pay (`pricing`). A loss budget bounds the cost of being wrong (`loss_budget`). A round that
proposes nothing need not be sent: under a lease the target starts it by itself. Rejection and block acceptance see
averages by depth only, never the probability of a token that might be dropped (`exactness` §7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from coordinator.policy.acceptance_stats import AcceptanceStats
from coordinator.policy.cycles import Cycles, Strategy
from coordinator.policy.explaining import explain_plan
from coordinator.policy.loss_budget import LossBudget
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.pricing import MESSAGE_MS, NOTHING, Choice, ProposalPricing, Rates
from coordinator.policy.round_times import DraftTimes, TargetTimes
from coordinator.sessions.round_draft import MAX_PENDING_TOKENS
from paceline.costs.acceptance import MAX_DEPTH
from paceline.costs.cycle import Cycle
from paceline.costs.service_costs import DEFAULT, UNKNOWN_LINE, DraftCosts, TargetCosts
from paceline.protocol.draft import Shadow
from paceline.protocol.explanation import PlanExplanation
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.records import RoundRecord
from paceline.sampling.match import Match

SHADOW_SHARE = 0.02
"""Largest share of time that drafts of all requests work for shadows alone: they may use the target's cores.
No loss budget counts it, so it stays below what a loss budget allows (`ALLOWED_SHARE`)."""
RATES_KEPT = 8
"""Rounds for which a request's rates are kept once it has run as many; chances hardly move in that time."""


class TargetPeerCosts(Protocol):
    """A target that states its costs."""

    @property
    def costs(self) -> TargetCosts:
        """The latest stated costs."""


class DraftPeerCosts(Protocol):
    """A draft service that states its costs."""

    @property
    def costs(self) -> DraftCosts:
        """The latest stated costs."""


class Planner:
    """Shared by a coordinator's requests: times of rounds at each peer, and each drafter's acceptance statistics."""

    def __init__(self) -> None:
        self._targets: WeakKeyDictionary[Any, TargetTimes] = WeakKeyDictionary()
        self._drafts: WeakKeyDictionary[Any, dict[str, DraftTimes]] = WeakKeyDictionary()
        self._stats: dict[tuple[str, Acceptance, bool], AcceptanceStats] = {}

    def target(self, peer: TargetPeerCosts) -> TargetTimes:
        """The times of rounds at a target."""
        if peer not in self._targets:
            peer_ref = ref(peer)  # the times of a peer that has gone go with it
            self._targets[peer] = TargetTimes(lambda: live.costs if (live := peer_ref()) else TargetCosts())
        return self._targets[peer]

    def draft(self, peer: DraftPeerCosts, drafter: str = DEFAULT) -> DraftTimes:
        """The times of one drafter at a draft service."""
        times = self._drafts.setdefault(peer, {})
        if drafter not in times:
            peer_ref = ref(peer)
            times[drafter] = DraftTimes(lambda: live.costs.line_of(drafter) if (live := peer_ref()) else UNKNOWN_LINE)
        return times[drafter]

    @property
    def some_target(self) -> TargetTimes | None:
        """The times of any target that has stated its costs, for a request that has no target yet."""
        return next((times for times in self._targets.values() if times.is_known), None)

    def stats(self, drafter: str, acceptance: Acceptance, *, greedy: bool) -> AcceptanceStats:
        """A drafter's acceptance statistics; greedy and sampled texts differ too much to share them."""
        return self._stats.setdefault((drafter, acceptance, greedy), AcceptanceStats())


class RequestPlanner:
    """Plans one request's rounds and learns from their results."""

    def __init__(self, planner: Planner, drafter: str, acceptance: Acceptance, *, greedy: bool) -> None:
        self._coupled = acceptance is Acceptance.COUPLED
        self._greedy = greedy
        self._planner = planner
        self._acceptance = acceptance
        self._drafter = drafter
        self._pool = planner.stats(drafter, acceptance, greedy=greedy)
        self._stats = self._pool.child()
        self._other_stats: dict[str, AcceptanceStats] = {}
        """The request's statistics of drafters that it used before."""
        self._peers: tuple[TargetPeerCosts | None, DraftPeerCosts | None] = None, None
        """The peers whose times are read; a reference keeps them."""
        self._target: TargetTimes | None = None
        self._draft: DraftTimes | None = None
        self._rates = Rates()
        self._loss_budget = LossBudget()
        self._round_counts: Counter[Strategy] = Counter()
        self._leases = False
        """Whether the target may start rounds by itself; then a round that is sent costs the sending, too."""
        self._rounds = 0
        self._run = self._shadow_end = 0
        """The number of latest consecutive positions whose token was the draft's first choice, and their end."""
        self._closed = False
        self._drafts_ahead = False
        self.reads_features = False
        """Whether the drafter reads the target's hidden states. The shadow of committed tokens, which have its
        features, then tells nothing of depths drafted on the drafter's own."""

    @property
    def target(self) -> TargetTimes | None:
        """The times of the request's target; before it has one, those of any target."""
        return self._target or self._planner.some_target

    def stats_of(self, drafter: str) -> AcceptanceStats:
        """The request's statistics of a drafter, or else those of all requests."""
        if drafter == self._drafter:
            return self._stats
        return self._other_stats.get(drafter) or self._planner.stats(drafter, self._acceptance, greedy=self._greedy)

    def optimistic_stats_of(self, drafter: str) -> AcceptanceStats:
        """An upper bound of a drafter's statistics; it is higher the less the drafter has been tried."""
        positions = self._planner.stats(drafter, self._acceptance, greedy=self._greedy).tokens.positions
        stats = self.stats_of(drafter)
        return replace(stats, tokens=stats.tokens.upper_bound(positions))

    def draft_with(self, drafter: str) -> None:
        """Plan with another drafter from now on. The statistics of texts stay."""
        self._other_stats[self._drafter] = old_stats = self._stats
        pool = self._planner.stats(drafter, self._acceptance, greedy=self._greedy)
        pool.texts = self._pool.texts
        self._drafter, self._pool = drafter, pool
        self._stats = self._other_stats.pop(drafter) if drafter in self._other_stats else pool.child()
        self._stats.texts = old_stats.texts
        self._run = self._shadow_end = 0

    def move(self, target: TargetPeerCosts | None, draft: DraftPeerCosts | None, drafter: str = DEFAULT) -> None:
        """Note the peers of the request's sessions, and the drafter of the draft's."""
        self._peers = target, draft
        times_there = None if target is None else self._planner.target(target)
        if times_there is not self._target:
            for times, change in ((self._target, -1), (times_there, 1)):
                if times is not None:
                    times.running += change
            self._target = times_there
        self._draft = None if draft is None else self._planner.draft(draft, drafter)

    def close(self) -> None:
        """Note the end of the request; it can still be explained."""
        if self._target is not None and not self._closed:
            self._target.running -= 1
        self._closed = True

    @property
    def expects_drafts(self) -> bool:
        """Whether drafting was expected to pay when the last request began: then the prompt is drafted on at once."""
        return self._pool.pays

    def plan(self, options: Options) -> Plan:
        """The plan of the next round."""
        if self._drafts_ahead:
            for stats in self._both:
                stats.take_ahead(options.cached_proposal)
        target, self._leases = self._target, options.lease > 0
        if options.room <= 0 or target is None:
            plan = Plan()
        elif not target.is_known:
            plan = Plan(lease=options.lease)
        else:
            plan = self._best(target, options)
        self._drafts_ahead = plan.fan_out > 0
        return plan

    def worth_verifying(self, proposal: Proposal) -> Proposal | None:
        """The first nodes of a model's proposal that pay for their rows if its outcome comes true."""
        pricing = self._pricing
        nodes = pricing.draft_value(proposal)[1] if pricing else 0
        return proposal.first(nodes) if nodes else None

    def worth_copying(self, match: Match | None, room: int) -> int:
        """How far to follow a match; None: there is none."""
        pricing = self._pricing
        return pricing.match_value(match, room)[1] if pricing and match else 0

    def worth_prefetching(self, match: Match, room: int) -> int:
        """How far to follow a match after its next token, which must come first; 0: not worth the message."""
        pricing, rest = self._pricing, match.advance(1)
        if pricing is None or rest is None:
            return 0
        value, nodes = pricing.match_value(rest, room)
        chance = self._stats.texts.ngrams.prefix_chances(match, 1)[0]
        return nodes if chance * value > self._rates.own * MESSAGE_MS else 0

    def verdict_due_ms(self, nodes: int, *, was_sent: bool) -> float:
        """Time from a round's sending, or from the verdict with which the target started it, to its own verdict."""
        if self._target is None:
            return 0.0
        step_ms = self._target.step_ms(1 + self._rates.around.rows + nodes)
        return step_ms if was_sent else max(0.0, step_ms - self._target.send_ms.value)

    def take_shadow(self, shadow: Shadow) -> None:
        """Update the statistics from the shadow of committed tokens, proposed or not."""
        if shadow.first_position != self._shadow_end:
            self._run = 0
        self._shadow_end = shadow.end
        for rank, q in zip(shadow.ranks, shadow.probabilities, strict=True):
            for stats in self._both:
                if self._coupled:
                    stats.tokens.take_rank(rank, q, self._run)
                else:
                    # Greedy acceptance is certain; for sampled texts q is a lower bound of it (Σ pq).
                    stats.tokens.take_average(float(rank == 1) if self._greedy else q)
            self._run = self._run + 1 if rank == 1 and not self.reads_features else 0

    def take_match(self, match: Match | None, committed: Sequence[int]) -> None:
        """Update the n-gram statistics from the committed tokens; `match` is the one before them, proposed or not."""
        for stats in self._both:
            stats.texts.ngrams.learn(match, committed)

    def take_late(self, waited_ms: float, depth: int) -> None:
        """Learn from a round that waited `waited_ms` for a proposal that did not come."""
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
        """Learn from a round's times and its proposal, of which `path` has the accepted nodes.

        It must not be called for a request's first round, which waits for the prompt. The wait for the first draft
        (`first_draft`) is left out, since the draft service computed the whole text for it.
        """
        self._rounds += 1
        self._pool.texts.elapsed_ms += record.round_ms
        for stats in self._both:
            stats.texts.take_round(plan.source, record)
        if self._target is None:
            return
        was_waiting = plan.source is Source.WAIT
        self._target.learn(record, beside=plan.fan_out > 0, late=was_waiting)
        if was_waiting and proposal is not None and not first_draft and self._draft is not None:
            self._draft.learn(record)
        if proposal is not None and plan.source is not Source.NGRAM and (self.reads_features or not self._coupled):
            for stats in self._both:
                stats.tokens.take_proposal(proposal, path, first=1 if self._coupled else 0)
        self._book(self._target, plan, record, proposal)

    def explain(self) -> PlanExplanation:
        """Explain the plans of the request."""
        if self._target is None:
            return PlanExplanation()
        cycles = Cycles(self._target, self._draft, self._stats, can_ahead=self._draft is not None)
        return explain_plan(cycles, self._rates.around, self._round_counts, self._loss_budget)

    def _book(self, target: TargetTimes, plan: Plan, record: RoundRecord, proposal: Proposal | None) -> None:
        proposed = len(proposal) if proposal is not None else 0
        drafts_ahead = self._rates.around.drafts_ahead
        token_ms = target.without_ms(record, proposed, beside=plan.fan_out > 0, others_beside=drafts_ahead)
        if not self._leases:
            token_ms += target.send_ms.value
        if record.self_started and proposal is None and not plan.fan_out:
            self._loss_budget.add_target_only(record.round_ms, token_ms)
            return
        committed = record.accepted + 1
        most_ms = record.draft_wait_ms + (committed + 1) * token_ms  # a pause of the machine is no one's price
        self._loss_budget.add(min(record.round_ms, most_ms), committed, token_ms)

    @property
    def _both(self) -> tuple[AcceptanceStats, AcceptanceStats]:
        return self._stats, self._pool

    @property
    def _pricing(self) -> ProposalPricing | None:
        return None if self._target is None else self._pricing_on(self._target)

    def _pricing_on(self, target: TargetTimes) -> ProposalPricing:
        return ProposalPricing(target, self._draft, self._stats, self._rates, coupled=self._coupled)

    def _best(self, target: TargetTimes, options: Options) -> Plan:
        if self._rounds <= RATES_KEPT or self._rounds % RATES_KEPT == 0:
            self._rates = self._rates_now(target, options)
        pricing = self._pricing_on(target)
        self._loss_budget.expect(options.room, target.step_ms(1 + self._rates.around.rows))
        if options.leased_rounds > 1:
            return self._plan_in_lease(pricing, options)
        fan_out, branch = self._outcome_shape(pricing, options)
        nodes = pricing.tree_nodes(branch, options)
        if options.self_started:
            return Plan(fan_out=fan_out, branch_depth=branch, branch_nodes=nodes)
        choice = self._choice(pricing, options)
        debt_rounds = self._loss_budget.rounds_until(choice.risk_ms)
        # A round that drafts ahead has to be sent, too, whether it proposes anything or not.
        if debt_rounds or choice.value <= (-pricing.sending_cost(options) if fan_out else 0.0):
            choice = NOTHING
        if choice is NOTHING and not fan_out:
            return self._rest(pricing, options, debt_rounds)
        plan = choice.plan
        self._round_counts[Strategy(plan.source, plan.depth, drafts_ahead=fan_out > 0)] += 1
        if plan.source is Source.WAIT:
            plan = pricing.open_ended(plan, options.room, self._loss_budget.left_ms)
        if options.leased_rounds:
            plan = Plan()
        return replace(plan, fan_out=fan_out, branch_depth=branch, branch_nodes=nodes) if fan_out else plan

    def _plan_in_lease(self, pricing: ProposalPricing, options: Options) -> Plan:
        """The plan where the target starts the next round and the one after it by itself: nothing is to be chosen."""
        self._round_counts[Strategy()] += 1
        self._take_match(pricing.match_choice(options))
        return Plan(shadow=options.drafts and self._may_shadow(options))

    def _rates_now(self, target: TargetTimes, options: Options) -> Rates:
        """The rates of the best strategy, where the others do what is best for all."""
        draft = self._draft if options.drafts else None
        most, can_ahead = min(options.room, MAX_DEPTH), options.fan_out > 0
        around = Cycles(target, draft, self._pool, most, can_ahead=can_ahead).balance(target.sessions)
        step_ms, slowdown = target.steps(), target.slowdown(around.rows + 1)
        alone_ms = step_ms(around.rows + 1)

        def net_rate(strategy: Strategy, cycle: Cycle) -> float:
            loss = around.rate * (step_ms(around.rows + strategy.rows) - alone_ms + slowdown * cycle.draft_ms)
            return Cycle(cycle.tokens - loss, cycle.ms).rate

        cycles = Cycles(target, draft, self._stats, most, can_ahead=can_ahead).all(around)
        rate, best = max(((net_rate(*item), item[0]) for item in cycles.items()), key=itemgetter(0))
        if draft is not None and not self._rounds and options.room >= MAX_DEPTH:
            # A new request has the statistics of all; later its own differ, and near its end its room is small.
            self._pool.pays = best.source is not Source.NONE
        # A draft at work beside the step slows it for all, so only all together choose that. Where they do, a wait
        # for the draft disturbs nobody any more.
        drafts_ahead = best.drafts_ahead if target.sessions == 1 else around.drafts_ahead
        disturbance = 0.0 if around.drafts_ahead else around.rate * slowdown
        return Rates(rate, disturbance, around, drafts_ahead)

    def _choice(self, pricing: ProposalPricing, options: Options) -> Choice:
        """The proposal of greatest value, which may be below 0; `NOTHING` where there is none."""
        match = pricing.match_choice(options)
        self._take_match(match)
        choices = (match, pricing.cached_choice(options), pricing.wait_choice(options, self._loss_budget.left_ms))
        real_choices = [choice for choice in choices if choice.plan.source is not Source.NONE]
        return max(real_choices, key=lambda choice: choice.value, default=NOTHING)

    def _take_match(self, match: Choice) -> None:
        for stats in self._both:
            stats.texts.match_value.add(max(0.0, match.value))

    def _outcome_shape(self, pricing: ProposalPricing, options: Options) -> tuple[int, int]:
        """Fan-out and depth of outcome drafting."""
        if not options.drafts or not options.fan_out or not self._rates.drafts_ahead:
            return 0, 0
        around = self._rates.around
        slower_ms = pricing.target.step_ms(1 + around.rows, beside=True) - pricing.target.step_ms(1 + around.rows)
        if self._loss_budget.rounds_until(0.0 if around.drafts_ahead else slower_ms):
            return 0, 0
        depth = pricing.usual_depth(options.room)
        return (options.fan_out, depth) if depth else (0, 0)

    def _rest(self, pricing: ProposalPricing, options: Options, debt_rounds: int) -> Plan:
        """A target-only plan under a lease, which ends when the loss budget has recovered or a match or draft is due.

        A round of the lease saves the time of sending it, and may miss the average worth of a match.
        """
        self._round_counts[Strategy()] += 1
        missed_tokens = 0.0 if options.can_prefetch else self._stats.texts.match_value.value
        lease = debt_rounds or options.lease
        if missed_tokens > 0:
            lease = int(min(lease, 2 * pricing.sending_cost(options) / missed_tokens))
        if self._draft is not None and options.drafts and options.lag and options.open_ms:
            step_ms = pricing.target.step_ms(1 + self._rates.around.rows)
            lease = int(min(lease, self._draft.catch_up_ms(options.lag, options.open_ms) / step_ms))
        return Plan(lease=min(options.lease, lease), shadow=options.drafts and self._may_shadow(options))

    def _may_shadow(self, options: Options) -> bool:
        """Whether the draft may work for the shadow of a token alone; if so its share of a full commit is counted.

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
