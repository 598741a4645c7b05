"""How much to draft, and with what: the greatest goodput by what is measured. Pure.

Each request follows the best strategy (`cycles`). The rate of that strategy is the worth of time, which decides which
tokens of which proposal pay (`pricing`). A loss budget bounds the cost of being wrong (`group`). Rejection and block
acceptance see averages by depth only, never the probability of a token that might be dropped (`exactness` §7).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary, proxy

from coordinator.policy.acceptance_stats import AcceptanceStats, RequestStats
from coordinator.policy.cycles import Cycles, Rates
from coordinator.policy.group import LossBudget
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.pricing import ProposalPricing
from coordinator.policy.round_times import DraftTimes, TargetTimes
from paceline.costs.goodput import LOOK_STEPS, MARGIN, Mode, load_of
from paceline.costs.running_mean import MEMORY, SPEED_MEMORY
from paceline.costs.service_costs import DEFAULT, DraftPeerCosts, TargetPeerCosts
from paceline.drafting.round_draft import MAX_PENDING_TOKENS
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.records import RoundRecord
from paceline.sampling.match import Match


class Planner:
    """Shared by a coordinator's requests: times of rounds at each peer, and each drafter's acceptance statistics."""

    def __init__(self) -> None:
        self.targets: WeakKeyDictionary[TargetPeerCosts, TargetTimes] = WeakKeyDictionary()
        self._drafts: WeakKeyDictionary[DraftPeerCosts, dict[str, DraftTimes]] = WeakKeyDictionary()
        self.stats: defaultdict[tuple[Acceptance, bool, str], AcceptanceStats] = defaultdict(AcceptanceStats)
        """By acceptance rule, whether texts are greedy (sampled ones differ too much to share them), and drafter."""

    def target(self, peer: TargetPeerCosts) -> TargetTimes:
        """The times of rounds at a target; those of a peer that has gone go with it."""
        return self.targets.get(peer) or self.targets.setdefault(peer, TargetTimes(proxy(peer)))

    def draft(self, peer: DraftPeerCosts, drafter: str = DEFAULT) -> DraftTimes:
        """The times of one drafter at a draft service."""
        by_drafter = self._drafts.setdefault(peer, {})
        return by_drafter.get(drafter) or by_drafter.setdefault(drafter, DraftTimes(proxy(peer), drafter))


class RequestPlanner:
    """Plans one request's rounds and learns from their results.

    Attributes:
        planner, stats: shared with the other requests; what it learned of drafters and texts.
        target, draft: the times of its peers; before a target has answered it, those of any, which counts it.
        rates: the worth of time.
        loss_budget: bounds what drafting may cost it, and what the matches of others may.
        rounds: from which it has learned.
    """

    def __init__(self, planner: Planner, drafter: str, rule: Acceptance, *, greedy: bool) -> None:
        self.planner, self._is_first = planner, not planner.stats
        self.stats = RequestStats(lambda key: planner.stats[rule, greedy, key], drafter, rule, greedy=greedy)
        self._peers: tuple[TargetPeerCosts | None, DraftPeerCosts | None] = None, None  # kept by a reference
        self.target: TargetTimes | None = None
        self.draft: DraftTimes | None = None
        self.rates = Rates()
        self.loss_budget = LossBudget()
        self._ahead_lag: int | None = None  # tokens that the draft lacked as it was to draft for outcomes, if it was
        self._ahead_ms = 0.0  # for which it has drafted for those of the round before
        self.rounds = self._sessions = 0
        self._move_to(next((times for times in planner.targets.values() if times.peer.costs.alone.is_known), None))

    @property
    def _target(self) -> TargetTimes | None:
        """The target that has answered it."""
        return None if self._peers[0] is None else self.target

    def move(self, target: TargetPeerCosts | None, draft: DraftPeerCosts | None, drafter: str = DEFAULT) -> None:
        """Note the peers of the request's sessions, and the drafter of the draft's."""
        self._peers = target, draft
        self._move_to(None if target is None else self.planner.target(target))
        self.draft = None if draft is None else self.planner.draft(draft, drafter)

    def _move_to(self, target: TargetTimes | None) -> None:
        if target is not self.target:
            self.close()
            self.target = target
        if target is not None and not self.rounds:
            self.loss_budget.loss = target.group.last_loss

    def close(self) -> None:
        """Note the end of the request; it can still be explained."""
        if self.target is not None:
            self.target.requests.pop(self, None)
            if not self.target.requests:  # who comes next is not left over by a burst, but may be the first of one
                (group := self.target.group).mode(1)  # which takes note of the load
                group.calm_at, group.last_loss = min(group.calm_at, group.steps + 1), min(0.0, self.loss_budget.loss)

    @property
    def expects_drafts(self) -> bool:
        """Whether drafts may work and promise to pay: then the prompt is drafted on at once."""
        if self.target is None:  # or a burst's prompts would all be computed beside the target's
            return self._is_first
        group, is_alone = self.target.group, self.target.sessions == 1
        return self.mode is Mode.DRAFTS and not 0 < (group.promise_alone if is_alone else group.promise) <= MARGIN

    @property
    def mode(self) -> Mode:
        """What the request may do with the others of its target."""
        return Mode.DRAFTS if self.target is None else self.target.group.mode(self.target.sessions)

    @property
    def leaves_drafts(self) -> bool:
        """Whether the group has left drafts for a pause."""
        return self.target is not None and not self.target.group.is_open(self.target.sessions, Mode.DRAFTS)

    @property
    def is_due(self) -> bool:
        """Whether to look at its rates and its text anew: soon at first, then as a machine changes its speed."""
        return self.rounds % SPEED_MEMORY == 0 or (self.rounds < SPEED_MEMORY and not self.rounds & (self.rounds - 1))

    @property
    def is_idle(self) -> bool:
        """Whether there is no choice: no draft may work, and its matches bring less than to look for them costs."""
        matches_pay = self.mode is Mode.MATCHES and 1 + self.stats.own.texts.match_value.value >= MARGIN
        return not (self.mode is Mode.DRAFTS or matches_pay or self.is_due)

    def plan(self, options: Options) -> Plan:
        """The plan of the next round."""
        if self.target is not None:
            self.target.requests[self] = None
        target, mode = self._target, self.mode
        computes = target is not None and self._ahead_lag == 0 and any(each._ahead_lag for each in target.requests)
        if target is not None and self._ahead_lag == 0 == options.lag and not computes:  # a text, so nobody can hit
            for stats in self.stats.both:
                stats.hits[load_of(target.sessions), False].add(float(options.cached_proposal is not None))
                stats.hits[load_of(target.sessions), True].add(float(options.self_started))
        if target is None or not target.peer.costs.alone.is_known:
            plan = Plan(lease=self._lease(options) if target is None else options.lease)
        elif mode is Mode.DRAFTS:
            plan = self._best(target, options)
        else:
            plan = self._plan_without_drafts(target, mode, options)
        self._ahead_lag = options.lag if plan.ahead.fan_out else None
        works = options.open_ms > 0 or plan.source is Source.WAIT or plan.shadow or plan.ahead.fan_out > 0
        return replace(plan, mode=mode, reads=mode is Mode.DRAFTS and works and options.lag > 0)

    def _plan_without_drafts(self, target: TargetTimes, mode: Mode, options: Options) -> Plan:
        """Who rests needs no more CPU than target-only."""
        lease = self._lease(options)
        if mode is Mode.MATCHES:
            return self._best(target, replace(options, cached_proposal=None, drafts=False, lease=lease))
        if self.draft is not None and target.group.steps >= target.group.promise_due:  # one works it out for all
            self.rates = self._rates_now(target, replace(options, drafts=False))
        return Plan(lease=0 if options.leased_rounds > 1 else lease)

    def _lease(self, options: Options) -> int:
        """No lease lasts beyond the step at which drafts begin; the first, by a load of the past, beyond a look."""
        most = options.lease if self._target is not None else min(options.lease, LOOK_STEPS)
        steps = 0 if self.target is None else self.target.group.steps_to_drafts(self.target.sessions)
        return most if steps is None else min(most, steps)

    def worth_verifying(self, proposal: Proposal) -> int:
        """How many nodes of a model's proposal pay for their rows if its outcome comes true."""
        return 0 if (target := self._target) is None else self._pricing(target).draft_value(proposal)[1]

    def worth_copying(self, match: Match | None, room: int, *, ends_lease: bool) -> int:
        """How far to follow a match; None: there is none. `ends_lease`: the round behind it has to be sent, then."""
        if (target := self._target) is None:
            return 0
        plan = self._pricing(target).match_plan(Options(room, match, lease=int(ends_lease)))
        return plan.nodes if plan.value > 0 and self._may_copy(target) else 0

    def take_match(self, match: Match | None, committed: Sequence[int], *, is_left_out: bool) -> None:
        """Learn from the tokens committed after a match; `is_left_out`: nothing was proposed."""
        self.stats.take_match(match, committed)
        if is_left_out and match is not None and self.target is not None and self.loss_budget.is_spent():
            one_ms, two_ms = map(self.target.steps(), (1, 2))  # a target that has just been joined may not say
            self.loss_budget.leave_out((match.following[0] == committed[0]) + 1 - two_ms / one_ms if one_ms else 0.0)

    def learn(self, plan: Plan, record: RoundRecord, proposal: Proposal | None, path: Sequence[int]) -> None:
        """Learn from a round; not from a first, which waits for the prompt. `path`: its proposal's accepted nodes."""
        target, sessions, self.rounds = self._target, self._sessions, self.rounds + 1
        self._ahead_ms = record.round_ms - record.draft_wait_ms if self._ahead_lag == 0 else 0.0
        self._sessions = 0 if target is None else target.sessions
        if target is not None and sessions == self._sessions and plan.mode is not None:
            steps = target.group.learn(record, sessions, len(target.requests), target.steps(), reads=plan.reads)
            if steps and not record.target.prefix_rows:
                is_plain = record.self_started and proposal is None and not plan.ahead.fan_out
                rests = plan.mode is Mode.REST or (is_plain and sessions == 1)
                self.loss_budget.add(steps if rests else record.accepted + 1, steps)
        if plan.mode in (Mode.REST, Mode.MATCHES) and not record.proposed and not self.is_due:
            return  # a token may cost no more CPU than target-only's
        self.stats.take_round(plan.source, record, proposal, path)
        if target is not None:
            target.learn(record, beside=plan.ahead.fan_out > 0, late=plan.source is Source.WAIT)
            if plan.source is Source.WAIT and not plan.reads and self.draft is not None:
                self.draft.learn(record, target.sessions)

    def _pricing(self, target: TargetTimes) -> ProposalPricing:
        budget, step_ms = self.loss_budget, target.steps()(1 + self.rates.rows)
        loss, regret = (budget.loss, budget.regret) if target.sessions == 1 else (0.0, 0.0)  # else the group
        left_ms, regret_ms = (budget.bound - loss) * step_ms, regret * step_ms
        return ProposalPricing(target, self.draft, self.stats, self.rates, left_ms, regret_ms, self._ahead_ms)

    def _best(self, target: TargetTimes, options: Options) -> Plan:
        if self.is_due or (options.drafts and self.rounds < SPEED_MEMORY):
            self.rates = self._rates_now(target, options)
        pricing = self._pricing(target)
        if options.leased_rounds > 1:  # the target starts the next round and the one after it: there is no choice
            self._match_plan(pricing, options)
            return Plan(shadow=self._may_shadow(options))
        is_mixed = self._ahead_lag is not None and (options.leased_rounds > 0 or options.self_started)  # its lease
        drafts_ahead = is_mixed or self.rates.strategy.source is Source.CACHED
        ahead = pricing.ahead(options) if drafts_ahead and options.drafts and pricing.left_ms > 0 else DraftBudget()
        lease = options.lease if ahead.fan_out and self.rates.strategy.goes_on else 0
        if options.self_started:
            return Plan(ahead=ahead, lease=lease)
        if ahead.fan_out:  # the round is sent, whether it proposes anything or not
            options = replace(options, lease=0, drafts=not lease)
        tries = self._tries_drafts(target)
        plan = self._best_proposal(pricing, options, tries=tries)
        if plan.source is Source.NONE and not ahead.fan_out:
            return self._rest(pricing, options, tries=tries)
        plan = Plan() if options.leased_rounds else pricing.open_ended(plan, options.room)
        return replace(plan, ahead=ahead, lease=lease)

    def _tries_drafts(self, target: TargetTimes) -> bool:
        """Whether it is the one request of the group that tries drafts which lost: each that does opens a session."""
        able = (each for each in target.requests if each.draft is not None and not each.loss_budget.is_spent())
        return target.group.tries_drafts(target.sessions) and self is next(able, None)

    def _may_copy(self, target: TargetTimes) -> bool:
        """Whether its matches may lengthen the others' steps: they have lost little, or their own win it back."""
        return target.sessions == 1 or not any(
            each is not self and each.loss_budget.is_spent(MEMORY * each.stats.own.texts.match_value.value)
            for each in target.requests
        )

    def _rates_now(self, target: TargetTimes, options: Options) -> Rates:
        """The rates of the best strategy. It says what drafts promise to all together, or to one that is alone."""
        group, is_alone = target.group, target.sessions == 1
        promises = self.draft is not None and (is_alone or options.drafts or group.steps >= group.promise_due)
        cycles = Cycles(target, self.draft, self.stats.own, options.fan_out > 0, options.can_prefetch)
        pool = self.stats.own if is_alone else self.stats.pool
        rates = cycles.rates(pool, drafts=options.drafts, promises=promises)
        if promises and is_alone:
            group.promise_alone = self._promise(target, rates.promise, options)
        elif promises:
            group.promise = self._promise(target, rates.promise, options)
            group.promise_due = group.steps + SPEED_MEMORY
        return rates

    def _promise(self, target: TargetTimes, promise: float, options: Options) -> float:
        """What drafts promise that begin with reading all texts; those of a group go on as long again."""
        is_alone = target.sessions == 1
        if not promise or self.draft is None or (self.mode is Mode.DRAFTS and not is_alone):
            return promise
        plain_ms, beside_ms = (target.steps(beside=beside)(target.sessions) for beside in (False, True))
        lost_ms = max(0.0, 1 - plain_ms / beside_ms) * self.draft.catch_up_ms(options.lag, options.open_ms)
        left = max(1, options.room if is_alone else min(self.rounds, options.room))
        return 1 / (1 / promise + target.sessions * lost_ms / (left * plain_ms))

    def _best_proposal(self, pricing: ProposalPricing, options: Options, *, tries: bool) -> Plan:
        """The plan whose proposal has the greatest value, which is below 0 only if one is tried."""
        match, tries_now = self._match_plan(pricing, options), tries and not options.lag
        plans = [match if match.value > 0 and self._may_copy(pricing.target) else Plan()]
        if pricing.left_ms > 0 or tries_now:
            plans += pricing.cached_plan(options), pricing.wait_plan(options, tries=tries)
        best = max(plans, key=lambda plan: plan.value)
        return best if best.value > 0 or tries_now else Plan()

    def _match_plan(self, pricing: ProposalPricing, options: Options) -> Plan:
        """The plan of the match, of which it learns whether or not it is followed."""
        plan = pricing.match_plan(options)
        for stats in self.stats.both:
            stats.texts.match_value.add(max(0.0, plan.value))
        return plan

    def _rest(self, pricing: ProposalPricing, options: Options, *, tries: bool) -> Plan:
        """A target-only plan under a lease, which ends when a match or draft is due.

        A round of the lease saves the time of sending it, and may miss the average worth of a match.
        """
        lease, missed_tokens = options.lease, 0.0 if options.can_prefetch else self.stats.own.texts.match_value.value
        if missed_tokens > 0:
            lease = int(min(lease, 2 * pricing.sending_cost / missed_tokens))
        if self.draft is not None and options.drafts and options.lag and options.open_ms:
            step_ms = pricing.target.steps()(1 + self.rates.rows)
            lease = int(min(lease, self.draft.catch_up_ms(options.lag, options.open_ms) / step_ms))
        return Plan(lease=lease, shadow=tries or self._may_shadow(options))

    def _may_shadow(self, options: Options) -> bool:
        """Whether the draft may work for a shadow alone, the text before it included; if so that is counted."""
        if self.draft is None or not options.drafts:
            return False
        texts, opening_ms = self.stats.pool.texts, 0.0 if options.open_ms else self.draft.step_ms(options.lag)
        cost_ms = self.draft.step_ms(MAX_PENDING_TOKENS) / MAX_PENDING_TOKENS + opening_ms
        if may_shadow := cost_ms <= texts.shadow_ms:
            texts.shadow_ms -= cost_ms
        return may_shadow
