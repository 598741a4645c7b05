"""The value of a proposal to a round, and its best length: tokens against the time that they cost. Pure.

A token of a proposal is worth its chance of being accepted. It costs a row, which all sessions of the step wait for,
and its wait, if it is drafted just in time (`exactness` §7, marginal rule):

    S_j  >  row ms · (tokens a ms of all)  +  wait ms · (tokens a ms of this session)
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from coordinator.policy.acceptance_stats import RequestStats
from coordinator.policy.cycles import Rates
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from paceline.costs.acceptance import MAX_DEPTH
from paceline.costs.cycle import AHEAD_ROWS, head_start_ms
from paceline.costs.running_mean import MEMORY
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, Proposal
from paceline.sampling.match import Match

MAX_MATCH_TOKENS = MAX_PROPOSAL_NODES // 2
"""Longest continuation of an n-gram match: chances by length are told apart up to there."""
OTHERS_WEIGHT = 3.0
"""Tokens that a match must bring for each that its rows take from the others of the step: drafts help all requests of
a group alike, a match helps its own request alone (decision 2026-11-26-requests-of-a-target-are-judged-together)."""
SMALLEST_CHANCE = 1 / MEMORY
"""Nodes that are reached more rarely than any mean can tell from never are not considered."""


@dataclass(frozen=True)
class ProposalPricing:
    """Values the proposals that a round may choose from.

    Attributes:
        target, draft: their times; draft None: no model drafts.
        stats: of the request.
        rates, left_ms, regret_ms: the worth of time, what the request may still lose, and its matches beyond that.
        ahead_ms: for which the draft has drafted for the outcomes of the round before.
    """

    target: TargetTimes
    draft: DraftTimes | None
    stats: RequestStats
    rates: Rates
    left_ms: float
    regret_ms: float = 0.0
    ahead_ms: float = 0.0

    def match_plan(self, options: Options) -> Plan:
        """The match's best continuation."""
        match = options.match
        return Plan() if match is None else self._ready(Source.NGRAM, self.match_value(match, options.room), options)

    def cached_plan(self, options: Options) -> Plan:
        """The cached proposal's first nodes that are worth their rows."""
        proposal = options.cached_proposal
        return self._ready(Source.CACHED, self.draft_value(proposal), options) if proposal else Plan()

    def _ready(self, source: Source, worth: tuple[float, int], options: Options) -> Plan:
        """The plan of a proposal that is there already."""
        value, nodes = worth
        sending_cost = self.sending_cost if nodes and options.lease else 0.0
        return Plan(source, nodes, nodes, value=value - sending_cost) if nodes else Plan()

    def wait_plan(self, options: Options, *, tries: bool) -> Plan:
        """The best to draft just in time, by half of what is left; one level by all of it, or more if it `tries`."""
        if not options.drafts or options.cached_proposal is not None or self.draft is None:
            return Plan()
        late_ms = self.target.late_ms(0.0) if options.lease else 0.0  # what is not known is to be found out
        left_ms, first_ms = self.left_ms, self.draft.catch_up_ms(options.lag, options.open_ms)
        trees = self.trees(min(options.room, MAX_DEPTH), options)
        prices, best = self._prices(trees[-1][1] if trees else 0), Plan()
        for depth, ((accepted, nodes), draft_ms) in enumerate(zip(trees, self._waits_ms, strict=False), 1):
            wait_ms = draft_ms + first_ms
            value = accepted - prices[nodes] - (wait_ms + late_ms) * self.rates.own
            if value > best.value and (2 * wait_ms <= left_ms or (depth == 1 and (tries or wait_ms <= left_ms))):
                patience_ms = min(left_ms, max(left_ms / 2, 2 * wait_ms))
                best = Plan(Source.WAIT, nodes, depth, patience_ms=patience_ms, value=value)
        return best

    def open_ended(self, plan: Plan, room: int) -> Plan:
        """A chain that is drafted while its next token is worth its cost, where probabilities may be used."""
        if plan.source is not Source.WAIT or not self.stats.is_coupled or plan.nodes > plan.depth:
            return plan
        depth = max(plan.depth, sum(2 * ms <= self.left_ms for ms in self._waits_ms[: min(room, MAX_DEPTH)]))
        price = self._prices(1)[1] + (self._waits_ms[1] - self._waits_ms[0]) * self.rates.own
        return replace(plan, depth=depth, nodes=depth, least_chance=min(1.0, price))

    @cached_property
    def _waits_ms(self) -> list[float]:
        """Waits for chains of 1, 2, … tokens, where all sessions draft or this one alone."""
        sessions = self.target.sessions if self.rates.strategy.depth else 1
        assert self.draft is not None, "nobody waits for no draft"
        head_ms = head_start_ms(self.ahead_ms, self.draft.step_ms(AHEAD_ROWS * sessions, beside=True))
        return [max(0.0, ms - head_ms) for ms in self.draft.waits(sessions)]

    def trees(self, most: int, options: Options) -> list[tuple[float, int]]:
        """Tokens accepted and nodes by depth, 1 to `most`; a second child where its chance exceeds a row's price."""
        reached = (1.0, *self.stats.own.tokens.reach(most))
        second = self.stats.own.tokens.by_rank[0].value if options.trees else 0.0
        price, tokens, nodes, trees = max(self._prices(1)[1], SMALLEST_CHANCE), 0.0, 0, []
        for parent, child in itertools.pairwise(reached):
            extra = (parent - child) * second
            tokens, nodes = tokens + child, nodes + 1
            if extra > price and nodes < MAX_PROPOSAL_NODES:
                tokens, nodes = tokens + extra, nodes + 1
            trees.append((tokens, nodes))
        return trees

    def match_value(self, match: Match, room: int) -> tuple[float, int]:
        """Value and length of the best continuation of a match; a wrong one costs no more than may still be lost."""
        (added_ms, least_ms), left_ms = self._added_ms, (self.left_ms + self.regret_ms) / self.target.factor.value
        most = min(room, bisect_right(added_ms, left_ms, 1, MAX_MATCH_TOKENS + 1) - 1)
        least = max(SMALLEST_CHANCE, self._price(OTHERS_WEIGHT) * least_ms)  # what is less likely pays for no row
        return self._best_first(self.stats.own.texts.ngrams.prefix_chances(match, most, least), OTHERS_WEIGHT)

    def draft_value(self, proposal: Proposal) -> tuple[float, int]:
        """Value and number of the first nodes of a model's proposal that are worth their rows."""
        return self._best_first(self.stats.own.tokens.node_chances(proposal, by_q=self.stats.is_coupled))

    def ahead(self, options: Options) -> DraftBudget:
        """Proposals for outcomes that are as long as the average chain that is worth its rows."""
        _, depth = self._best_first(self.stats.own.tokens.reach(min(options.room, MAX_DEPTH)))
        nodes = self.trees(depth, options)[-1][1] if depth else 0
        return DraftBudget(depth, max_nodes=nodes, fan_out=options.fan_out) if depth else DraftBudget()

    @property
    def sending_cost(self) -> float:
        """Tokens that are lost by sending a round that the target could start by itself.

        The others of the step wait for it, or it misses the step, whichever costs less (`target_service.batching`).
        """
        send_ms, step_ms = self.target.send_ms.value, self.target.steps()(1 + self.rates.rows)
        return min((self.rates.own + self.rates.others) * send_ms, self.rates.own * max(send_ms, step_ms))

    def _best_first(self, chances: Sequence[float], weight: float = 1.0) -> tuple[float, int]:
        """The greatest value of the first n nodes, n ≥ 1, and that n; (0, 0) when none is worth anything."""
        likely = itertools.takewhile(lambda chance: chance >= SMALLEST_CHANCE, chances)
        prices, sums = self._prices(len(chances), weight), enumerate(itertools.accumulate(likely), 1)
        return max([(0.0, 0), *((tokens - prices[nodes], nodes) for nodes, tokens in sums)])

    def _prices(self, most: int, weight: float = 1.0) -> list[float]:
        """Tokens that all sessions of the step lose by n more rows, n = 0 to `most`; `weight`: of the others'."""
        price, (added_ms, _) = self._price(weight), self._added_ms
        return [price * ms for ms in added_ms[: most + 1]]

    def _price(self, weight: float) -> float:
        """Tokens that all sessions of the step lose by a millisecond of the target's line."""
        return (self.rates.own + weight * self.rates.others) * self.target.factor.value

    @property
    def _added_ms(self) -> tuple[tuple[float, ...], float]:
        return self.target.peer.costs.alone.added_ms(1 + self.rates.rows, MAX_PROPOSAL_NODES)
