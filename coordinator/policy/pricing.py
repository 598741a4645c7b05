"""The value of a proposal to a round, and its best length: tokens against the time that they cost. Pure.

A token of a proposal is worth its chance of being accepted. It costs a row, which all sessions of the step wait for,
and its wait, if it is drafted just in time (`exactness` §7, marginal rule):

    S_j  >  row ms · (tokens a ms of all)  +  wait ms · (tokens a ms of this session)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.policy.acceptance_stats import AcceptanceStats
from coordinator.policy.cycles import Rates
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from paceline.costs.acceptance import MAX_DEPTH, survival
from paceline.costs.running_mean import MEMORY
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
class Choice:
    """A proposal that the round could carry: its `value` in tokens, and its cost where nothing is accepted."""

    value: float = -math.inf
    risk_ms: float = 0.0
    plan: Plan = field(default_factory=Plan)


NOTHING = Choice()


@dataclass(frozen=True)
class ProposalPricing:
    """Values the proposals that a round may choose from.

    Attributes:
        target, draft: their times; draft None: no model drafts.
        stats: the drafter's acceptance statistics.
        rates: the worth of time.
        coupled: whether a proposal's own probabilities may be used.
    """

    target: TargetTimes
    draft: DraftTimes | None
    stats: AcceptanceStats
    rates: Rates
    coupled: bool

    def match_choice(self, options: Options) -> Choice:
        """The match's best continuation."""
        match = options.match
        return NOTHING if match is None else self._ready(Source.NGRAM, self.match_value(match, options.room), options)

    def cached_choice(self, options: Options) -> Choice:
        """The cached proposal's first nodes that are worth their rows."""
        proposal = options.cached_proposal
        return self._ready(Source.CACHED, self.draft_value(proposal), options) if proposal else NOTHING

    def _ready(self, source: Source, worth: tuple[float, int], options: Options) -> Choice:
        """The choice of a proposal that is there already."""
        value, nodes = worth
        if not nodes:
            return NOTHING
        risk_ms = self.target.send_ms.value + self._rows_ms(nodes)[-1]
        cost = self.sending_cost if options.lease else 0.0
        return Choice(value - cost, risk_ms, Plan(source, nodes, nodes))

    def wait_choice(self, options: Options, left_ms: float) -> Choice:
        """The best proposal to draft just in time. Its risk must be allowed twice, since it may be as late again.

        Nothing is drafted where a proposal is there already.
        """
        if not options.drafts or options.cached_proposal is not None or self.draft is None:
            return NOTHING
        sent_price = self.rates.own * (self.target.late_send_ms.value if options.lease else 0.0)
        first_ms, way_ms = self.draft.catch_up_ms(options.lag, options.open_ms), self.target.send_ms.value
        waits_ms = self.draft.waits(self.rates.drafting)
        trees = self.trees(min(options.room, MAX_DEPTH), options)
        rows_ms = self._rows_ms(trees[-1][1] if trees else 0)
        prices = self._prices(rows_ms)
        best = NOTHING
        for depth, (accepted, nodes) in enumerate(trees, 1):
            wait_ms = waits_ms[depth - 1] + first_ms
            value = accepted - prices[nodes] - wait_ms * self.rates.own - sent_price
            risk_ms = wait_ms + way_ms + rows_ms[nodes]
            if value > best.value and (2 * risk_ms <= left_ms or nodes == 1):
                best = Choice(value, risk_ms, Plan(Source.WAIT, nodes, depth, patience_ms=wait_ms))
        return best

    def open_ended(self, plan: Plan, room: int, left_ms: float) -> Plan:
        """A waiting plan with its limits: the wait is at most twice the expected one, or half of the allowed loss.

        Where probabilities may be used, the draft goes on while the next token is worth its cost. So a sure stretch
        may be longer than the average one, and an unsure one ends sooner.
        """
        assert self.draft is not None, "only a draft is waited for"
        most_ms = min(max(2 * plan.patience_ms, left_ms / 2), left_ms)
        if self.coupled and plan.nodes == plan.depth:
            waits_ms = self.draft.waits(self.rates.drafting)[: min(room, MAX_DEPTH)]
            depth = max(plan.depth, sum(ms <= most_ms for ms in waits_ms))
            price = self._row_price + self.draft.step_ms(self.rates.drafting) * self.rates.own
            plan = replace(plan, depth=depth, nodes=depth, least_chance=min(1.0, price))
        return replace(plan, patience_ms=most_ms)

    def trees(self, most: int, options: Options) -> list[tuple[float, int]]:
        """Expected accepted tokens and nodes of a tree by its depth, from 1 to `most`.

        A chain gets a second child where its chance exceeds a row's price.
        """
        reached = (1.0, *survival(self.stats.tokens.chances(most)))
        second = self.stats.tokens.by_rank[0].value if options.trees else 0.0
        price, tokens, nodes, trees = max(self._row_price, SMALLEST_CHANCE), 0.0, 0, []
        for parent, child in itertools.pairwise(reached):
            extra = (parent - child) * second
            tokens, nodes = tokens + child, nodes + 1
            if extra > price and nodes < MAX_PROPOSAL_NODES:
                tokens, nodes = tokens + extra, nodes + 1
            trees.append((tokens, nodes))
        return trees

    def match_value(self, match: Match, room: int) -> tuple[float, int]:
        """Value and length of the best continuation of a match."""
        chances = self.stats.texts.ngrams.prefix_chances(match, min(room, MAX_MATCH_TOKENS))
        return self._best_first(chances, OTHERS_WEIGHT)

    def draft_value(self, proposal: Proposal) -> tuple[float, int]:
        """Value and number of the first nodes of a model's proposal that are worth their rows."""
        return self._best_first(self.stats.tokens.node_chances(proposal, by_q=self.coupled))

    def ahead(self, options: Options) -> Plan:
        """Drafts for outcomes, as long as the average chain that is worth its rows."""
        _, depth = self._best_first(survival(self.stats.tokens.chances(min(options.room, MAX_DEPTH))))
        return (
            Plan(fan_out=options.fan_out, branch_depth=depth, branch_nodes=self.trees(depth, options)[-1][1])
            if depth
            else Plan()
        )

    @property
    def sending_cost(self) -> float:
        """Tokens that are lost by sending a round that the target could start by itself.

        The others of the step wait for it, or it misses the step, whichever costs less (`target_service.batching`).
        """
        send_ms, step_ms = self.target.send_ms.value, self.target.step_ms(1 + self.rates.rows)
        return min(self._prices([send_ms])[0], self.rates.own * max(send_ms, step_ms))

    def _best_first(self, chances: Sequence[float], weight: float = 1.0) -> tuple[float, int]:
        """The greatest value of the first n nodes, n ≥ 1, and that n; (0, 0) when none is worth anything."""
        likely = list(itertools.takewhile(lambda chance: chance >= SMALLEST_CHANCE, chances))
        prices = self._prices(self._rows_ms(len(likely)), weight)
        values = ((tokens - prices[nodes], nodes) for nodes, tokens in enumerate(itertools.accumulate(likely), 1))
        return max((0.0, 0), *values) if likely else (0.0, 0)

    @property
    def _row_price(self) -> float:
        """Tokens that one more row takes."""
        return self._prices(self._rows_ms(1))[1]

    def _rows_ms(self, most: int) -> list[float]:
        """Milliseconds that n more rows add to a step, for n = 0 to `most`."""
        rows, step_ms = 1 + self.rates.rows, self.target.steps()
        base_ms = step_ms(rows)
        return [step_ms(rows + more) - base_ms for more in range(most + 1)]

    def _prices(self, rows_ms: Sequence[float], weight: float = 1.0) -> list[float]:
        """Tokens that all sessions of the step lose in these times; `weight`: of those of the others."""
        rate = self.rates.own + weight * self.rates.others
        return [rate * more_ms for more_ms in rows_ms]
