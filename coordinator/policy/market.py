"""What a proposal is worth to a round, and how much of it: tokens against the time that they cost. Pure.

A token of a proposal is worth its chance of being accepted. It costs a row, which all sessions of the step wait for,
and its wait, if it is drafted just in time (`exactness` §7, marginal rule):

    S_j  >  row ms · (tokens a ms of all)  +  wait ms · (tokens a ms of this session)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.policy.cycles import ALONE, Surroundings
from coordinator.policy.growth import MOST_LAST, SMALLEST_CHANCE, expected_of_trees
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from coordinator.policy.seen import MAX_DEPTH, Seen, survival
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, Proposal
from paceline.sampling.match import Match

MAX_MATCH_TOKENS = 32
"""Longest continuation of an n-gram match: chances by length are told apart up to there."""
MESSAGE_MS = 0.5
"""Time that a message takes of its sender's and its receiver's cores (docs/reports/overlap-2026-11-22.md)."""


@dataclass(frozen=True)
class Rates:
    """What time is worth to a request; tokens a millisecond.

    Attributes:
        own: of this request at its best, less what the others lose by its rows.
        disturbed: what the others lose of theirs while a draft is at work beside their steps.
        around: what all the others do.
        ahead: whether outcomes are drafted for in that best way.
    """

    own: float = 0.0
    disturbed: float = 0.0
    around: Surroundings = ALONE
    ahead: bool = False


@dataclass(frozen=True)
class Choice:
    """A proposal that the round could carry; `value` in tokens, `risk_ms`: what it costs if nothing is accepted."""

    value: float = 0.0
    risk_ms: float = 0.0
    plan: Plan = field(default_factory=Plan)


NOTHING = Choice()


@dataclass(frozen=True)
class Market:
    """What a round may choose from, and at which prices.

    Attributes:
        target, draft: what things take; draft None: no model drafts.
        seen: what is known of the drafter's tokens.
        rates: what time is worth.
        coupled: whether a proposal's own probabilities may be looked at.
    """

    target: TargetTimes
    draft: DraftTimes | None
    seen: Seen
    rates: Rates
    coupled: bool

    def match(self, options: Options) -> Choice:
        """The match's best continuation."""
        if options.match is None:
            return NOTHING
        value, nodes = self.copied(options.match, options.room)
        plan = Plan(Source.NGRAM, nodes, nodes)
        return Choice(value - self.sending(options), self._risk_ms(nodes), plan)

    def cached(self, options: Options) -> Choice:
        """The cached proposal's first nodes that are worth their rows."""
        if options.cached is None or not len(options.cached):
            return NOTHING
        value, nodes = self.drafted(options.cached)
        plan = Plan(Source.CACHED, nodes, nodes)
        return Choice(value - self.sending(options), self._risk_ms(nodes), plan)

    def wait(self, options: Options, left_ms: float) -> Choice:
        """The best proposal to draft just in time, at a risk that can be borne twice: it may come as late again.

        What is there already is not drafted again.
        """
        if not options.drafts or options.cached is not None or self.draft is None:
            return NOTHING
        by_depth = self.seen.chances(min(options.room, MAX_DEPTH))
        chains, trees = expected_of_trees(by_depth, ()), expected_of_trees(by_depth, self._others(options))
        rows_ms = self._rows_ms(len(chains) + MOST_LAST)
        prices = self._prices(rows_ms)
        sent_ms = self.target.sent_late.value if options.lease else 0.0
        first_ms = self.draft.catch_up_ms(options.lag, options.open_ms)
        best, chosen = -math.inf, (0, 0, 0.0, 0.0)
        waits, wait_price = self.draft.waits(self.rates.around.drafting), self.rates.own + self.rates.disturbed
        sent_price, way_ms = self.rates.own * sent_ms, self.target.sent.value
        for depth, (chain, tree) in enumerate(zip(chains, trees, strict=False), 1):
            wait_ms = waits(depth) + first_ms
            # As many nodes as steps are a chain.
            for nodes, expected in enumerate((*chain, *tree[1:]), depth):
                value = expected - prices[nodes] - wait_ms * wait_price - sent_price
                risk_ms = wait_ms + way_ms + rows_ms[nodes]
                if value > best and (2 * risk_ms <= left_ms or nodes == 1):
                    best, chosen = value, (nodes, depth, wait_ms, risk_ms)
        nodes, depth, wait_ms, risk_ms = chosen
        if not nodes:
            return NOTHING
        return Choice(best, risk_ms, Plan(Source.WAIT, nodes, depth, patience_ms=wait_ms))

    def open_ended(self, plan: Plan, room: int, left_ms: float) -> Plan:
        """A plan that waits, with its ends: as long again as it should take, or half of what may be lost.

        Where the draft may look at its own probabilities it goes on while the next token is worth its cost, so a
        sure stretch may go further than the average one, and an unsure one ends sooner.
        """
        assert self.draft is not None, "only a draft is waited for"
        most_ms = max(2 * plan.patience_ms, left_ms / 2)
        if self.coupled and plan.nodes == plan.depth:
            waits = self.draft.waits(self.rates.around.drafting)
            longer = range(plan.depth + 1, min(room, MAX_DEPTH) + 1)
            depth = max((depth for depth in longer if waits(depth) <= most_ms), default=plan.depth)
            level_ms = self.draft.step_ms(self.rates.around.drafting)
            price = self._prices(self._rows_ms(1))[1] + level_ms * (self.rates.own + self.rates.disturbed)
            plan = replace(plan, depth=depth, nodes=depth, least_chance=min(1.0, price))
        return replace(plan, patience_ms=most_ms)

    def tree_nodes(self, depth: int, options: Options) -> int:
        """Nodes of a proposal of this depth: second children are added where their chance exceeds a row's price."""
        if not options.trees or not depth:
            return depth
        price = self._prices(self._rows_ms(1))[1]
        reached = (1.0, *survival(self.seen.chances(depth)))
        second = self.seen.others()[0]
        extra = sum((above - below) * second > price for above, below in itertools.pairwise(reached))
        return min(depth + extra, MAX_PROPOSAL_NODES)

    def _others(self, options: Options) -> list[float]:
        return self.seen.others() if options.trees else []

    def copied(self, match: Match, room: int) -> tuple[float, int]:
        """Value and length of the best continuation of a match."""
        return self._best_first(self.seen.texts.ngrams.reached(match, min(room, MAX_MATCH_TOKENS)))

    def drafted(self, proposal: Proposal) -> tuple[float, int]:
        """Value and number of a model's proposal's first nodes that are worth their rows."""
        return self._best_first(self.seen.reached(proposal, by_q=self.coupled))

    def usual_depth(self, room: int) -> int:
        """Length of the average chain that is worth its rows."""
        return self._best_first(survival(self.seen.chances(min(room, MAX_DEPTH))))[1]

    def _best_first(self, reached: Sequence[float]) -> tuple[float, int]:
        """The greatest value of the first n nodes, n ≥ 1, and that n; (0, 0) when none is worth anything."""
        best = (0.0, 0)
        likely = list(itertools.takewhile(lambda chance: chance >= SMALLEST_CHANCE, reached))
        prices = self._prices(self._rows_ms(len(likely)))
        for nodes, expected in enumerate(itertools.accumulate(likely), 1):
            best = max(best, (expected - prices[nodes], nodes))
        return best

    def _rows_ms(self, most: int) -> list[float]:
        """What a step takes longer by n rows more, for n = 0 to `most`."""
        rows = 1 + self.rates.around.rows
        step_ms = self.target.steps()
        base_ms = step_ms(rows)
        return [step_ms(rows + more) - base_ms for more in range(most + 1)]

    def _prices(self, rows_ms: Sequence[float]) -> list[float]:
        """Tokens that all sessions of the step lose meanwhile."""
        all_rates = self.rates.own + self.rates.around.rate
        return [all_rates * more_ms for more_ms in rows_ms]

    def _risk_ms(self, nodes: int) -> float:
        """What verifying so many nodes costs this request if none is accepted."""
        rows = 1 + self.rates.around.rows
        return self.target.sent.value + self.target.step_ms(rows + nodes) - self.target.step_ms(rows)

    def sending(self, options: Options) -> float:
        """Tokens that a round loses by being sent, where the target could start it by itself."""
        return self.rates.own * self.target.sent.value if options.lease else 0.0
