"""How much to draft, and with what: the greatest goodput by what is measured.

A token of a proposal is worth its chance of being accepted. It costs a row, which all sessions of the step wait for,
and its wait, if it is drafted just in time:

    S_j  >  row ms · (tokens a ms of all)  +  wait ms · (tokens a ms of this session)

The rates are those of the best way to run rounds (`cycles`), so this is the marginal rule of the greatest goodput.
A round without a proposal need not be sent: under a lease the target starts it by itself. Rejection and block
acceptance see averages by depth only, never the probability of a token that might be dropped (`exactness` §7).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

from coordinator.policy.account import Account
from coordinator.policy.cycles import ALONE, Cycles, Surroundings, Way
from coordinator.policy.growth import MOST_LAST, SMALLEST_CHANCE, expected_of_trees
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from coordinator.policy.seen import MAX_DEPTH, PRIOR_WEIGHT, Seen, survival
from paceline.costs.running_mean import RunningMean
from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol.draft import Shadow
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, Acceptance, Proposal
from paceline.protocol.records import RoundRecord
from paceline.sampling.ngram import Match

MAX_MATCH_TOKENS = 32
"""Longest continuation of an n-gram match: chances by length are told apart up to there."""
MESSAGE_MS = 0.5
"""Time that a message takes of its sender's and its receiver's cores (docs/reports/overlap-2026-11-22.md)."""
SHADOW_SHARE = 0.02
"""Most of the time that a draft is at work for shadow alone: its cores may be the target's."""
SHADOW_TOKENS = 16
"""Committed tokens that a draft hears of together while nothing is proposed."""
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
        self._targets: WeakKeyDictionary[Hashable, TargetTimes] = WeakKeyDictionary()
        self._drafts: WeakKeyDictionary[Hashable, DraftTimes] = WeakKeyDictionary()
        self._seen: dict[tuple[str, Acceptance, bool], Seen] = {}

    def target(self, peer: TargetPeerCosts) -> TargetTimes:
        """What rounds take at a target."""
        return self._targets.setdefault(peer, TargetTimes(lambda: peer.costs))

    def draft(self, peer: DraftPeerCosts) -> DraftTimes:
        """What drafts take at a draft service."""
        return self._drafts.setdefault(peer, DraftTimes(lambda: peer.costs))

    def seen(self, drafter: str, acceptance: Acceptance, *, greedy: bool) -> Seen:
        """What is known of a drafter; greedy and sampled texts differ too much to share."""
        return self._seen.setdefault((drafter, acceptance, greedy), Seen())


@dataclass(frozen=True)
class Rates:
    """What time is worth to a request; tokens a millisecond.

    Attributes:
        own: as this request runs at its best.
        around: what all the others do.
        ahead: whether outcomes are drafted for in that best way.
    """

    own: float = 0.0
    around: Surroundings = ALONE
    ahead: bool = False


@dataclass(frozen=True)
class Choice:
    """A proposal that the round could carry; `value` in tokens, `risk_ms`: what it costs if nothing is accepted."""

    value: float = 0.0
    risk_ms: float = 0.0
    plan: Plan = Plan()


NOTHING = Choice()


class RequestPlanner:
    """Plans one request's rounds and learns from what became of them."""

    def __init__(self, planner: Planner, drafter: str, acceptance: Acceptance, *, greedy: bool) -> None:
        self._coupled = acceptance is Acceptance.COUPLED
        self._greedy = greedy
        self._planner = planner
        self._pool = planner.seen(drafter, acceptance, greedy=greedy)
        self._seen = self._pool.child()
        self._target: TargetTimes | None = None
        self._draft: DraftTimes | None = None
        self.account = Account()
        self.chosen: Counter[Way] = Counter()
        self._rates = Rates()
        self._rounds = 0
        self._worth = RunningMean(1.0, 1.0, limit=PRIOR_WEIGHT)
        self._drafted_ahead = False
        self._shadow_ms = self._elapsed_ms = 0.0
        self._expected_wait_ms = 0.0

    def move(self, target: TargetPeerCosts | None, draft: DraftPeerCosts | None) -> None:
        """The request's sessions are at these peers now."""
        found = None if target is None else self._planner.target(target)
        if found is not self._target:
            for times, change in ((self._target, -1), (found, 1)):
                if times is not None:
                    times.running += change
            self._target = found
        self._draft = None if draft is None else self._planner.draft(draft)

    def close(self) -> None:
        """The request has ended."""
        self.move(None, None)

    def plan(self, options: Options) -> Plan:
        """What the next round should do."""
        if self._drafted_ahead:
            for seen in self._both:
                seen.hits.add(float(options.cached is not None))
        plan = self._plan(options)
        self._drafted_ahead = plan.fan_out > 0
        return plan

    def worth_verifying(self, proposal: Proposal) -> Proposal | None:
        """The first nodes of a model's proposal that are worth their rows if its outcome comes true."""
        nodes = self._best_first(self._seen.reached(proposal, by_q=self._coupled))[1]
        return proposal.first(nodes) if nodes else None

    def worth_copying(self, length: int, room: int) -> int:
        """How far to follow a match of this length if it was right so far."""
        return self._best_first(self._copied(length, room))[1]

    def worth_prefetching(self, length: int, room: int) -> int:
        """How far to follow a match behind its next token, which must come first; 0: not worth the message."""
        value, nodes = self._best_first(self._copied(length + 1, room))
        return nodes if self._seen.by_match.chance(length) * value > self._rates.own * MESSAGE_MS else 0

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
        for rank, q in zip(shadow.ranks, shadow.probabilities, strict=True):
            for seen in self._both:
                if self._coupled:
                    seen.take_rank(rank, q)
                else:
                    # Greedy texts leave no doubt; of a sampled one q is what acceptance is at the least (Σ pq).
                    seen.take_average(float(rank == 1) if self._greedy else q)

    def take_match(self, match: Match, committed: Sequence[int]) -> None:
        """Compare a match's continuation with what was committed after it, whether it was proposed or not."""
        for seen in self._both:
            seen.take_match(match, committed)

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
        self._elapsed_ms += record.round_ms
        if self._target is None:
            return
        waited = plan.source is Source.WAIT
        self._target.learn(record, beside=plan.fan_out > 0, late=waited)
        if waited and proposal is not None and not first_draft and self._draft is not None:
            self._draft.learn(record)
        if proposal is not None and plan.source is not Source.NGRAM and not self._coupled:
            for seen in self._both:
                seen.take_proposal(proposal, path)
        self._book(plan, record, proposal)

    def _book(self, plan: Plan, record: RoundRecord, proposal: Proposal | None) -> None:
        assert self._target is not None, "checked before"
        own_rows = 1 + (len(proposal) if proposal is not None else 0)
        token_ms = self._target.step_ms(max(0, record.target.rows - own_rows) + 1)
        if proposal is None and not plan.fan_out and plan.source is Source.NONE:
            self.account.pass_by(record.round_ms, token_ms)
            return
        committed = record.accepted + 1
        most_ms = record.draft_wait_ms + (committed + 1) * token_ms  # a pause of the machine is no one's price
        self.account.add(min(record.round_ms, most_ms), committed, token_ms)

    @property
    def _both(self) -> tuple[Seen, Seen]:
        return self._seen, self._pool

    def _plan(self, options: Options) -> Plan:
        if options.room <= 0 or self._target is None:
            return Plan()
        if not self._target.is_known:
            return Plan(lease=options.lease)
        self._set_rates(options)
        fan_out, depth = self._meanwhile(options)
        if options.self_started:
            return Plan(fan_out=fan_out, branch_depth=depth, branch_nodes=self._tree_nodes(depth, options))
        best = self._best(options)
        if best.plan.source is Source.NONE and not fan_out:
            return self._resting(options)
        self.chosen[Way(best.plan.source, best.plan.depth or best.plan.nodes, ahead=fan_out > 0)] += 1
        if options.leased:
            best = NOTHING
        if options.leased > 1:
            fan_out = depth = 0
        return replace(
            best.plan, fan_out=fan_out, branch_depth=depth, branch_nodes=self._tree_nodes(depth, options)
        )

    def _set_rates(self, options: Options) -> None:
        """The rates of the best way, with what the others do for the best of all."""
        assert self._target is not None, "checked before"
        if self._rounds > RATES_KEPT and self._rounds % RATES_KEPT:
            return
        cycles = Cycles(
            self._target,
            self._draft if options.drafts else None,
            self._seen,
            min(options.room, MAX_DEPTH),
            can_ahead=options.fan_out > 0,
        )
        sessions = self._target.sessions
        around = Cycles(cycles.target, cycles.draft, self._pool, cycles.most, cycles.can_ahead).balanced(sessions)
        lost = around.rate * self._target.step_ms(around.rows + 1)

        def gain(cycle_rows: int, tokens: float) -> float:
            assert self._target is not None
            return tokens - around.rate * self._target.step_ms(around.rows + cycle_rows) + lost

        best = max(cycles.all(around), key=lambda each: gain(each.way.rows, each.tokens) / max(each.ms, 1e-9))
        self._rates = Rates(best.rate, around, best.way.ahead)

    def _best(self, options: Options) -> Choice:
        """The proposal of greatest value among those that the account can bear."""
        match = self._match(options)
        for seen in self._both:
            seen.copied.add(match.value)
        choices = [choice for choice in (match, self._cached(options), self._wait(options)) if choice.value > 0]
        self._worth.add(max((choice.value for choice in choices), default=0.0))
        borne = (choice for choice in choices if not self.account.rounds_until(choice.risk_ms))
        return max(borne, key=lambda choice: choice.value, default=NOTHING)

    def _resting(self, options: Options) -> Plan:
        """Target-only, under a lease that is the shorter the more a round may miss meanwhile."""
        sending = self._sending(options)
        worth = self._worth.value
        owed = self.account.rounds_until(0.0)
        if owed:
            lease = owed
        elif options.can_prefetch or worth <= 0:
            lease = options.lease
        else:
            lease = int(2 * sending / worth)
        return Plan(lease=min(options.lease, lease), shadow=self._may_shadow(options))

    def _may_shadow(self, options: Options) -> bool:
        """Whether the draft may be at work for shadow alone now; it is asked once for `SHADOW_TOKENS`."""
        if self._draft is None or not options.drafts or not self._draft.is_known:
            return False
        cost_ms = self._draft.step_ms(SHADOW_TOKENS) / SHADOW_TOKENS
        if self._shadow_ms + cost_ms > SHADOW_SHARE * self._elapsed_ms:
            return False
        self._shadow_ms += cost_ms
        return True

    def _sending(self, options: Options) -> float:
        """Tokens that a round loses by being sent, where the target could start it by itself."""
        assert self._target is not None, "checked before"
        return self._rates.own * self._target.sent.value if options.lease else 0.0

    def _match(self, options: Options) -> Choice:
        """The match's best continuation."""
        if options.match is None:
            return NOTHING
        value, nodes = self._best_first(self._copied(options.match.length, options.room))
        plan = Plan(Source.NGRAM, nodes, nodes)
        return Choice(value - self._sending(options), self._risk_ms(nodes), plan)

    def _cached(self, options: Options) -> Choice:
        """The cached proposal's first nodes that are worth their rows."""
        if options.cached is None or not len(options.cached):
            return NOTHING
        value, nodes = self._best_first(self._seen.reached(options.cached, by_q=self._coupled))
        plan = Plan(Source.CACHED, nodes, nodes)
        return Choice(value - self._sending(options), self._risk_ms(nodes), plan)

    def _wait(self, options: Options) -> Choice:
        """The best proposal to draft just in time; what is there already is not drafted again."""
        if not options.drafts or options.cached is not None or self._draft is None or self._target is None:
            return NOTHING
        by_depth = self._seen.chances(min(options.room, MAX_DEPTH))
        chains, trees = expected_of_trees(by_depth, ()), expected_of_trees(by_depth, self._others(options))
        prices = self._row_prices(len(chains) + MOST_LAST)
        sent_ms = self._target.sent_late.value if options.lease else 0.0
        best = NOTHING
        for depth, (chain, tree) in enumerate(zip(chains, trees, strict=False), 1):
            wait_ms = self._draft.wait_ms(depth, self._rates.around.drafting)
            # As many nodes as steps are a chain.
            for nodes, expected in enumerate((*chain, *tree[1:]), depth):
                value = expected - prices[nodes] - self._rates.own * (wait_ms + sent_ms)
                if value > best.value:
                    best = Choice(value, wait_ms + self._risk_ms(nodes), Plan(Source.WAIT, nodes, depth))
                    self._expected_wait_ms = wait_ms
        return best if best is NOTHING else self._open_ended(best, options)

    def _open_ended(self, best: Choice, options: Options) -> Choice:
        """Where the draft may look at its own probabilities it ends where the next token isn't worth its cost.

        Then a sure stretch may go further than the average one.
        """
        assert self._draft is not None, "checked before"
        patience_ms = self._expected_wait_ms + max(self._expected_wait_ms, self.account.left_ms - best.risk_ms)
        plan = replace(best.plan, patience_ms=patience_ms)
        if self._coupled and plan.nodes == plan.depth:
            depth = min(options.room, MAX_DEPTH)
            price = self._row_prices(1)[1] + self._rates.own * self._draft.step_ms(self._rates.around.drafting)
            plan = replace(plan, depth=depth, nodes=depth, least_chance=min(1.0, price))
        return Choice(best.value, best.risk_ms, plan)

    def _meanwhile(self, options: Options) -> tuple[int, int]:
        """Fan-out and depth of outcome drafting."""
        if not options.drafts or not options.fan_out or not self._rates.ahead or self._target is None:
            return 0, 0
        rows = 1 + self._rates.around.rows
        if self.account.rounds_until(self._target.step_ms(rows, beside=True) - self._target.step_ms(rows)):
            return 0, 0
        depth = self._best_first(survival(self._seen.chances(min(options.room, MAX_DEPTH))))[1]
        return (options.fan_out, depth) if depth else (0, 0)

    def _tree_nodes(self, depth: int, options: Options) -> int:
        """Nodes of a proposal of this depth: second children are added where their chance exceeds a row's price."""
        if not options.trees or not depth:
            return depth
        price = self._row_prices(1)[1]
        reached = (1.0, *survival(self._seen.chances(depth)))
        second = self._seen.others()[0]
        extra = sum((above - below) * second > price for above, below in itertools.pairwise(reached))
        return min(depth + extra, MAX_PROPOSAL_NODES)

    def _others(self, options: Options) -> list[float]:
        return self._seen.others() if options.trees else []

    def _copied(self, length: int, room: int) -> list[float]:
        """Chance of each token of a match's continuation."""
        chance = self._seen.by_match.chance
        return survival(chance(length + place) for place in range(min(room, MAX_MATCH_TOKENS)))

    def _best_first(self, reached: Sequence[float]) -> tuple[float, int]:
        """The greatest value of the first n nodes, n ≥ 1, and that n; (0, 0) when none is worth anything."""
        best = (0.0, 0)
        likely = list(itertools.takewhile(lambda chance: chance >= SMALLEST_CHANCE, reached))
        prices = self._row_prices(len(likely))
        for nodes, expected in enumerate(itertools.accumulate(likely), 1):
            best = max(best, (expected - prices[nodes], nodes))
        return best

    def _row_prices(self, most: int) -> list[float]:
        """Tokens that all sessions of the step lose while it computes n rows more, for n = 0 to `most`."""
        if self._target is None:
            return [0.0] * (most + 1)
        around = self._rates.around
        base_ms = self._target.step_ms(1 + around.rows)
        all_rates = self._rates.own + around.rate
        return [all_rates * (self._target.step_ms(1 + around.rows + rows) - base_ms) for rows in range(most + 1)]

    def _risk_ms(self, nodes: int) -> float:
        """What verifying so many nodes costs this request if none is accepted."""
        assert self._target is not None, "checked before"
        rows = 1 + self._rates.around.rows
        return self._target.sent.value + self._target.step_ms(rows + nodes) - self._target.step_ms(rows)
