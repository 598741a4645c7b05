"""How much to draft, and with what, for the next round: expected tokens against the time that they cost, as measured.

A plan's value is `expected accepted tokens - λ · (time it adds)` with λ = the
request's running tokens per millisecond (`exactness` §7, marginal rule); the
time of a round without a draft is the same for every plan and cancels. A row
delays every session that shares the target's step, so its price counts each of
them. Rejection and block acceptance see averages by depth only, never the
probability of a token that might be dropped.

A round without a proposal need not be sent: under a lease the target starts it
by itself, which saves the round trip. But rounds under a lease can't carry
proposals. So rounds are leased where proposals have lately been worth less than
their round trips; there, a proposal must be worth its round trip.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.policy.cost_model import RANKS, CostModel
from coordinator.policy.growth import MOST_LAST, SMALLEST_CHANCE, expected_of_trees
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.restraint import Guard, Probe
from paceline.costs.running_mean import RunningMean
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT, Acceptance, Proposal
from paceline.protocol.records import RoundRecord
from paceline.sampling.ngram import Match

MAX_MODEL_TOKENS = 16
"""Longest path that a model is asked for."""
MAX_MATCH_TOKENS = 32
"""Longest continuation of an n-gram match."""
OUTLIER = 4.0
"""A round that takes longer than this many target-only ones counts as so many."""
SHORT_LEASE = 3
"""Rounds that may be leased while something worth proposing may turn up that can't be prefetched: it is missed for as
many rounds. More at a distance."""
MESSAGE_MS = 0.5
"""Time that a message takes of its sender's and its receiver's cores."""
LEAST_PLAIN = 3
"""Target-only rounds that a coordinator begins with: nothing is drafted before it is known what that must beat."""
MARGIN = 0.05
"""Tokens that a proposal must be worth for a round to wait for it: chances are known no better than that."""
QUIET_ROUNDS = 2
"""One round more may be leased for each so many consecutive rounds in which nothing was worth proposing."""


@dataclass(frozen=True)
class _ProposalShape:
    """A proposal that could be drafted just in time, and its value, which is negative for some probes."""

    value: float = -math.inf
    depth: int = 0
    nodes: int = 0


def survival(chances: Iterable[float]) -> list[float]:
    """Chance that the first j tokens are all accepted, for j = 1, 2, …"""
    return list(itertools.accumulate(chances, operator.mul))


class RequestPolicy:
    """Plans one request's rounds and learns from what became of them."""

    def __init__(self, cost_model: CostModel, drafter: str, acceptance: Acceptance, *, greedy: bool) -> None:
        self._costs = cost_model.costs
        self._coupled = acceptance is Acceptance.COUPLED
        self._shared = cost_model.of(drafter, greedy)
        self._own = self._shared.child()
        plain = self._costs.plain
        self._tokens = RunningMean(1.0, 4.0, limit=30.0)
        self._round_ms = RunningMean(plain.value, 4.0 if plain.weight else 0.0, limit=30.0)
        self._sharers = RunningMean(1.0, 1.0, limit=10.0)
        self._other_rows = RunningMean(0.0, 1.0, limit=10.0)
        self._guard = Guard()
        self._probe = Probe()
        self._quiet = 0
        self._probes = False
        self._outcome_drafting_was_on = False

    @property
    def rate(self) -> float:
        """λ: tokens a millisecond, as this request runs now; 0 before any time is known."""
        return self._tokens.value / self._round_ms.value if self._round_ms.value > 0 else 0.0

    def plan(self, options: Options) -> Plan:
        """What the next round should do."""
        if self._outcome_drafting_was_on:
            for statistics in (self._own, self._shared):
                statistics.hits.add(float(options.cached is not None))
        if options.room <= 0:
            plan = Plan()
        elif options.self_started:
            plan = self._meanwhile(options)
        elif self._costs.plain.weight < LEAST_PLAIN:
            plan = Plan()
        elif self._guard.holds():
            plan = Plan(lease=min(options.lease, self._guard.left))
        else:
            plan = self._best(options)
        self._outcome_drafting_was_on = plan.fan_out > 0
        return plan

    def worth_verifying(self, proposal: Proposal) -> Proposal | None:
        """The first nodes of a model's proposal that are worth their rows if its outcome comes true."""
        _, nodes = self._best_first(self._reached(proposal))
        return proposal.first(nodes) if nodes else None

    def worth_copying(self, length: int, room: int) -> int:
        """How far to follow a match of this length if it was right so far."""
        return self._match_value(length, room)[1]

    def worth_prefetching(self, length: int, room: int) -> int:
        """How far to follow a match behind its next token, which must come first; 0: not worth the message."""
        value, nodes = self._match_value(length + 1, room)
        return nodes if self._own.by_match.chance(length) * value > self.rate * MESSAGE_MS else 0

    def verdict_due_ms(self, nodes: int, *, sent: bool) -> float:
        """From when on what leaves for the target is expected to come too late for a round's verdict.

        Counted from when the round was sent, or else from the verdict with which the target started it. Not above 0
        while too little is known.
        """
        step_ms = self._costs.step.ms(1 + self._other_rows.value + nodes)
        return step_ms if sent else step_ms - self._costs.round_trip

    def learn_match(self, match: Match, committed: Sequence[int]) -> None:
        """Compare a match's continuation with what was committed after it, whether it was proposed or not."""
        guesses = match.continuation(len(committed))
        for i, (guess, token) in enumerate(zip(guesses, committed, strict=True)):
            for statistics in (self._own, self._shared):
                statistics.by_match.add(match.length + i, guess == token)
            if guess != token:
                return

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
        committed = record.accepted + 1
        plain_ms = self._costs.plain.value
        limit = OUTLIER * committed * plain_ms if plain_ms else record.round_ms
        ms = min(record.round_ms, limit)
        self._tokens.add(committed)
        self._round_ms.add(ms)
        if proposal is not None and plan.source is not Source.NGRAM:
            self._learn_acceptance(proposal, path)
        self._learn_costs(plan, record, proposal, ms, first_draft=first_draft)
        if proposal is not None or plan.fan_out:
            self._guard.add(committed, ms, plain_ms)
        self._probe.add(ms, drafted=plan.fan_out > 0 or plan.source is Source.CACHED)
        if self._probes:
            self._probe.cost(max(0.0, record.round_ms - committed * plain_ms))
            self._probes = False

    def _best(self, options: Options) -> Plan:
        """The plan of greatest value, and whether drafting outcomes meanwhile is worth its time."""
        match, cached, wait = self._match(options), self._cached(options), self._wait(options)
        value, source, nodes = max(
            (0.0, Source.NONE, 0),
            (match[0], Source.NGRAM, match[1]),
            (cached[0], Source.CACHED, cached[1]),
            (wait.value - MARGIN, Source.WAIT, wait.nodes),
            key=operator.itemgetter(0),
        )
        for statistics in (self._own, self._shared):
            statistics.worth.add(value)
        sending = self._sending(options)
        self._quiet = self._quiet + 1 if value <= sending else 0
        if self._quiet:
            source, nodes = Source.NONE, 0
        until_probe = self._rounds_until_probe(wait, source)
        if until_probe == 0 and not options.leased:
            return self._probing(wait)
        fan_out, depth = self._outcome_drafting(options, max(sending, match[0], wait.value))
        leases = source is Source.NONE and sending > 0 and not fan_out
        if leases:
            most = options.lease if options.can_prefetch else self._short_lease()
            return Plan(lease=min(options.lease, most if until_probe is None else until_probe, most))
        if options.leased:
            source, nodes = Source.NONE, 0
        if options.leased > 1:
            fan_out = depth = 0
        tree = self._tree_nodes(depth, options)
        return Plan(source, nodes, wait.depth if source is Source.WAIT else nodes, fan_out, depth, tree)

    def _meanwhile(self, options: Options) -> Plan:
        """What to draft while the target verifies the round that it has started."""
        if self._guard.left:
            return Plan()
        fan_out, depth = self._outcome_drafting(options, self._match(options)[0])
        return Plan(fan_out=fan_out, branch_depth=depth, branch_nodes=self._tree_nodes(depth, options))

    def _sending(self, options: Options) -> float:
        """Tokens that a proposal must be worth to be sent where the target could start the round by itself; else 0.

        Rounds are leased where proposals are worth less than that on average.
        """
        sending = self.rate * self._costs.sending
        return sending if options.lease and self._own.worth.value < sending else 0.0

    def _short_lease(self) -> int:
        """Rounds to lease where a proposal may turn up.

        A lease is extended when half of it is left, which must cover the round trip.
        """
        costs = self._costs
        far = 2 * math.ceil(costs.round_trip / costs.plain.value) if costs.plain.value else 0
        return max(SHORT_LEASE, far, self._quiet // QUIET_ROUNDS)

    def _rounds_until_probe(self, tried: _ProposalShape, source: Source) -> int | None:
        """Rounds before a model that isn't used should be tried again; None: it need not be."""
        if source not in (Source.NONE, Source.NGRAM) or not tried.nodes:
            return None
        verify = self._costs.verify
        return self._probe.rounds_until(self._costs.wait(tried.depth) + verify.ms(1 + tried.nodes) - verify.ms(1))

    def _probing(self, tried: _ProposalShape) -> Plan:
        """Try the shape that would be the best, or the least bad, by what is known."""
        self._probes = True
        self._probe.tried()
        return Plan(Source.WAIT, tried.nodes, tried.depth)

    def _match(self, options: Options) -> tuple[float, int]:
        """Value and length of the match's best continuation."""
        if options.match is None:
            return 0.0, 0
        return self._match_value(options.match.length, options.room)

    def _match_value(self, length: int, room: int) -> tuple[float, int]:
        chances = (self._own.by_match.chance(length + i) for i in range(min(room, MAX_MATCH_TOKENS)))
        return self._best_chain(chances)

    def _cached(self, options: Options) -> tuple[float, int]:
        """Value and number of the cached proposal's first nodes that are worth their rows."""
        if options.cached is None or not len(options.cached):
            return 0.0, 0
        return self._best_first(self._reached(options.cached))

    def _reached(self, proposal: Proposal) -> list[float]:
        """Chance of each node of a model's proposal."""
        reached: list[float] = []
        for node, chance in enumerate(self._node_chances(proposal)):
            parent = proposal.parents[node]
            reached.append(chance if parent == ROOT else chance * reached[parent])
        return reached

    def _wait(self, options: Options) -> _ProposalShape:
        """The best proposal to draft just in time, or the least bad; what is there already is not drafted again."""
        best = _ProposalShape()
        if not options.drafts or not options.waits or options.cached is not None:
            return best
        costs, rate = self._costs, self.rate
        by_depth = self._depth_chances(options.room)
        by_rank = [self._own.by_rank.chance(rank) for rank in range(2, MOST_LAST + 1)] if options.trees else []
        chains, trees = expected_of_trees(by_depth, ()), expected_of_trees(by_depth, by_rank)
        prices = self._row_prices(len(chains) + MOST_LAST)
        for depth, (chain, tree) in enumerate(zip(chains, trees, strict=False), 1):
            wait_price = rate * costs.wait(depth)
            # As many nodes as steps are a chain.
            for nodes, expected in enumerate((*chain, *tree[1:]), depth):
                value = expected - prices[nodes] - wait_price
                if value > best.value:
                    best = _ProposalShape(value, depth, nodes)
        return best

    def _outcome_drafting(self, options: Options, otherwise: float) -> tuple[int, int]:
        """Fan-out and depth of outcome drafting; `otherwise` is what a round is worth without it."""
        if not options.drafts or not options.fan_out:
            return 0, 0
        value, depth = self._best_chain(self._depth_chances(options.room))
        gain = self._own.hits.value * max(0.0, value - otherwise)
        # The drafting of all that share the step delays all of them; each request counts its own share.
        cost = self.rate * max(0.0, self._costs.outcome_drafting.value)
        return (options.fan_out, depth) if gain > cost else (0, 0)

    def _tree_nodes(self, depth: int, options: Options) -> int:
        """Nodes of a proposal of this depth: second children are added where their chance exceeds a row's price."""
        if not options.trees or not depth:
            return depth
        *_, before, after = self._row_prices(depth + 1)
        price = after - before
        reached = (1.0, *survival(self._depth_chances(depth)))
        second = self._own.by_rank.chance(2)
        extra = sum((above - below) * second > price for above, below in itertools.pairwise(reached))
        return min(depth + extra, MAX_PROPOSAL_NODES)

    def _depth_chances(self, room: int) -> list[float]:
        return [self._own.by_depth.chance(depth) for depth in range(1, min(room, MAX_MODEL_TOKENS) + 1)]

    def _node_chances(self, proposal: Proposal) -> list[float]:
        """Chance of each node, given that its parent is accepted."""
        if not self._coupled:
            return [self._own.by_depth.chance(depth) for depth in proposal.depths]
        tables = self._own.by_q
        return [
            tables[rank].chance(q) for rank, q in zip(_ranks(proposal), proposal.draft_probabilities, strict=True)
        ]

    def _best_chain(self, chances: Iterable[float]) -> tuple[float, int]:
        return self._best_first(survival(chances))

    def _best_first(self, reached: Sequence[float]) -> tuple[float, int]:
        """The greatest value of the first n nodes, n ≥ 1, and that n; (0, 0) when none is worth anything."""
        best = (0.0, 0)
        likely = list(itertools.takewhile(lambda chance: chance >= SMALLEST_CHANCE, reached))
        prices = self._row_prices(len(likely))
        for n, expected in enumerate(itertools.accumulate(likely), 1):
            best = max(best, (expected - prices[n], n))
        return best

    def _row_prices(self, most: int) -> list[float]:
        """Tokens that all sessions of the step lose while it computes n rows more, for n = 0 to `most`."""
        each_ms = self.rate * self._sharers.value
        return [each_ms * ms for ms in self._costs.verify.beyond(1 + self._other_rows.value, most)]

    def _learn_acceptance(self, proposal: Proposal, path: Sequence[int]) -> None:
        for depth, (node, taken) in enumerate(zip((ROOT, *path), (*path, None), strict=True), 1):
            children = [child for child, parent in enumerate(proposal.parents) if parent == node]
            if not children:
                return
            for statistics in (self._own, self._shared):
                statistics.by_depth.add(depth, children[0] == taken)
                for rank, child in enumerate(children[1:], 2):
                    if taken not in children[: rank - 1]:
                        statistics.by_rank.add(rank, child == taken)
                for rank, child in enumerate(children):
                    q = proposal.draft_probabilities[child]
                    statistics.by_q[min(rank, RANKS - 1)].add(q, child == taken)

    def _learn_costs(
        self, plan: Plan, record: RoundRecord, proposal: Proposal | None, ms: float, *, first_draft: bool
    ) -> None:
        costs, target = self._costs, record.target
        step_ms = target.forward_ms + target.sample_ms
        if not record.self_started:
            queue = costs.queue_late if plan.source is Source.WAIT else costs.queue
            queue.add(min(target.queue_ms, OUTLIER * step_ms))
        beyond = costs.ahead if record.self_started else costs.sent
        beyond.add(max(0.0, ms - record.draft_wait_ms - step_ms))
        own_rows = 1 + (len(proposal) if proposal is not None else 0)
        waiting = 1 + (target.queue_ms / target.forward_ms if target.forward_ms > 0 else 0)
        self._sharers.add(max(1, target.sessions) * min(waiting, OUTLIER))
        self._other_rows.add(max(0, target.rows - own_rows))
        costs.step.observe(max(1, target.rows), step_ms)
        if plan.fan_out:
            costs.outcome_drafting.add(
                min(step_ms, OUTLIER * costs.verify.ms(target.rows)) - costs.verify.ms(target.rows)
            )
        else:
            costs.verify.observe(max(1, target.rows), step_ms)
            if proposal is None:
                measured = costs.plain_ahead if record.self_started else costs.plain_sent
                measured.add(ms)
                costs.plain.add(ms if record.self_started else max(0.0, ms - costs.sending))
        if plan.source is Source.WAIT and proposal is not None and not first_draft:
            level_ms = record.draft.forward_ms / max(1, record.proposed)
            costs.draft_step.add(level_ms)
            costs.draft_wire.add(max(0.0, record.draft_wait_ms - record.draft.forward_ms))


def _ranks(proposal: Proposal) -> list[int]:
    """Each node's place among its siblings, capped to the ranks that are told apart."""
    seen: dict[int, int] = {}
    ranks: list[int] = []
    for parent in proposal.parents:
        rank = seen.get(parent, 0)
        seen[parent] = rank + 1
        ranks.append(min(rank, RANKS - 1))
    return ranks
