"""The cycles that a session can run, and the balance of those that share a target. Pure.

A token costs a wait only where it is drafted just in time. A row costs all who share the step. What the others do
decides what either costs, so there is more than one balance: where nobody waits, steps are small and waiting is
dear; where all wait, steps are full and it is cheap. So the balance of each plan that all follow together is worked
out, the one of greatest goodput is taken, and each session then chooses for itself against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from coordinator.policy.acceptance_stats import AcceptanceStats
from coordinator.policy.plan import Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from paceline.costs.acceptance import MAX_DEPTH
from paceline.costs.cycle import AHEAD_ROWS, Cycle, ahead_cycle, expected_tokens, tokens_ahead, wait_cycle


@dataclass(frozen=True)
class Strategy:
    """How rounds are run: the source of most proposals, their length, and whether outcomes are drafted meanwhile."""

    source: Source = Source.NONE
    depth: int = 0
    drafts_ahead: bool = False

    @property
    def rows(self) -> int:
        """The number of a session's rows in a step."""
        return 1 + self.depth


TARGET_ONLY = Strategy()
WAIT_STRATEGIES = tuple(Strategy(Source.WAIT, depth) for depth in range(1, MAX_DEPTH + 1))
AHEAD_STRATEGIES = tuple(Strategy(Source.CACHED, depth, drafts_ahead=True) for depth in range(1, MAX_DEPTH + 1))


@dataclass(frozen=True)
class Surroundings:
    """The load that other sessions put on a session's rounds.

    Attributes:
        sessions: the number of sessions that share the steps, this one included.
        rows: the others' rows in a step.
        rate: tokens a millisecond of all the others.
        drafting: the number of sessions that draft at once, this one included.
        drafts_ahead: whether they draft for outcomes; then the draft works during every step.
    """

    sessions: int = 1
    rows: float = 0.0
    rate: float = 0.0
    drafting: float = 1.0
    drafts_ahead: bool = False


NO_OTHERS = Surroundings()


@dataclass(frozen=True)
class Rates:
    """The worth of time to a request, in tokens a millisecond.

    Attributes:
        own: the rate of this request at its best, less the others' loss by its rows.
        around: the load by the others.
        drafts_ahead: whether the best strategy drafts for outcomes.
    """

    own: float = 0.0
    around: Surroundings = NO_OTHERS
    drafts_ahead: bool = False


@dataclass(frozen=True)
class Cycles:
    """The cycles that a session could run.

    Attributes:
        target, draft: their times; draft None: no model drafts.
        stats: the drafter's acceptance statistics.
        most: longest proposal.
        can_ahead: whether outcomes may be drafted for.
    """

    target: TargetTimes
    draft: DraftTimes | None
    stats: AcceptanceStats
    most: int = MAX_DEPTH
    can_ahead: bool = False

    def all(self, around: Surroundings = NO_OTHERS) -> dict[Strategy, Cycle]:
        """The cycle of every strategy, under a load that does not change with it."""
        return self._cycles([around.rows] * (1 + MAX_DEPTH), around.drafting)

    def balance(self, sessions: int) -> Surroundings:
        """The load by the others where all sessions follow the strategy that is best for all together."""
        if sessions <= 1:
            return NO_OTHERS
        strategy, best = self.best_common_cycle(sessions)
        others = sessions - 1
        in_step = 1 - best.away_ms / best.ms if best.ms > 0 else 1.0
        drafting = sessions if strategy.source is not Source.NONE else 1
        return Surroundings(
            sessions, others * strategy.rows * in_step, others * best.rate, drafting, strategy.drafts_ahead
        )

    def best_common_cycle(self, sessions: int) -> tuple[Strategy, Cycle]:
        """The strategy that is best for all sessions where they share every step, and a session's cycle then."""
        return max(self._common_cycles(sessions).items(), key=lambda item: item[1].rate)

    def promise(self, sessions: int, room: int, lag: int) -> float:
        """The gain over matches that drafts promise the rest of a text, where all sessions do what is best for all.

        Args:
            sessions: that share the target, each with as much to write and to open.
            room: tokens that are left to write.
            lag: tokens that the draft has to compute first. Meanwhile it slows the target's steps down.
        """
        cycles = self._common_cycles(sessions)
        plain = cycles.pop(TARGET_ONLY).rate
        best = max((cycle.rate for cycle in cycles.values()), default=0.0)
        if self.draft is None or not plain or not best:
            return 0.0
        opening_ms = sessions * self.draft.step_ms(lag) * self.target.slowdown(sessions)
        return (room / plain) / (room / best + opening_ms)

    def rates(self, around: Surroundings) -> tuple[Strategy, Rates]:
        """The strategy that is best for one session where the others do as said, and its rates."""
        step_ms = self.target.steps()
        alone_ms = step_ms(around.rows + 1)

        def net_rate(strategy: Strategy, cycle: Cycle) -> float:
            loss = around.rate * (step_ms(around.rows + strategy.rows) - alone_ms)
            return Cycle(cycle.tokens - loss, cycle.ms).rate

        net_rates = {strategy: net_rate(strategy, cycle) for strategy, cycle in self.all(around).items()}
        best = max(net_rates, key=net_rates.__getitem__)
        # A draft at work beside the step slows it for all, so only all together choose that.
        drafts_ahead = best.drafts_ahead if around.sessions == 1 else around.drafts_ahead
        return best, Rates(net_rates[best], around, drafts_ahead)

    def _common_cycles(self, sessions: int) -> dict[Strategy, Cycle]:
        """A session's cycle of every strategy, where all follow it and share every step."""
        return self._cycles([(sessions - 1) * (1 + depth) for depth in range(1 + MAX_DEPTH)], sessions)

    def _cycles(self, others: Sequence[float], drafting: float) -> dict[Strategy, Cycle]:
        """The cycle of every strategy.

        Args:
            others: the others' rows in a step, by the depth of the strategy.
            drafting: the number of sessions that draft at once.
        """
        alone_ms, sent_ms = self.target.steps(), self.target.late_send_ms.value
        cycles = {TARGET_ONLY: Cycle(1.0 + self.stats.texts.match_value.value, alone_ms(others[0] + 1))}
        if self.draft is None or not self.draft.is_known:
            return cycles
        waits_ms = self.draft.waits(drafting)[: self.most]
        for strategy, rows, draft_ms in zip(WAIT_STRATEGIES, others[1:], waits_ms, strict=False):
            step_ms = alone_ms(rows + strategy.rows)
            cycles[strategy] = wait_cycle(self._tokens[strategy.depth], step_ms, draft_ms, sent_ms)
        if self.can_ahead:
            level_ms = self.draft.step_ms(AHEAD_ROWS * drafting)
            for strategy, rows, draft_ms in zip(AHEAD_STRATEGIES, others[1:], waits_ms, strict=False):
                cycles[strategy] = self._ahead_cycle(strategy.depth, rows, draft_ms, level_ms)
        return cycles

    @cached_property
    def _tokens(self) -> list[float]:
        """Expected tokens of a round by the length of its proposal."""
        return expected_tokens(self.stats.tokens.chances(self.most))

    def _ahead_cycle(self, depth: int, rows: float, draft_ms: float, level_ms: float) -> Cycle:
        """The cycle with outcome drafting. Hits wait for nothing; misses wait for the draft, or go without it."""
        target, tokens = self.target, self._tokens
        beside_ms = target.steps(beside=True)
        step_ms, single_ms = beside_ms(rows + 1 + depth), beside_ms(rows + 1) + target.send_ms.value
        drafted = tokens_ahead(step_ms, level_ms, depth)
        hits = self.stats.hits.value if drafted else 0.0
        without = Cycle(1.0, single_ms, max(0.0, single_ms - step_ms))
        waiting = wait_cycle(tokens[depth], step_ms, draft_ms, target.late_send_ms.value)
        return ahead_cycle(hits, Cycle(tokens[drafted], step_ms), (without, waiting))
