"""The cycles that a session can run, and the balance of those that share a target. Pure.

A token costs a wait only where it is drafted just in time. A row costs all who share the step. What the others do
decides what either costs, so there is more than one balance: where nobody waits, steps are small and waiting is
dear; where all wait, steps are full and it is cheap. So the balance of each plan that all follow together is worked
out, and the one of greatest goodput says what time is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from coordinator.policy.acceptance_stats import AcceptanceStats
from coordinator.policy.plan import Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from paceline.costs.acceptance import MAX_DEPTH
from paceline.costs.cycle import AHEAD_ROWS, Cycle, ahead_cycle, expected_tokens, tokens_ahead, wait_cycle


@dataclass(frozen=True)
class Strategy:
    """How rounds are run: the source of most proposals, and their length. Cached ones are drafted ahead."""

    source: Source = Source.NONE
    depth: int = 0

    @property
    def rows(self) -> int:
        """The number of a session's rows in a step."""
        return 1 + self.depth


TARGET_ONLY = Strategy()
WAIT_STRATEGIES = tuple(Strategy(Source.WAIT, depth) for depth in range(1, MAX_DEPTH + 1))
AHEAD_STRATEGIES = tuple(Strategy(Source.CACHED, depth) for depth in range(1, MAX_DEPTH + 1))


@dataclass(frozen=True)
class Rates:
    """The worth of time in tokens a millisecond, and the load by the other sessions of the steps.

    Attributes:
        own: the rate of this request at its best.
        others: that of all the others.
        rows: the others' rows in a step.
        drafting: the number of sessions that draft at once, this one included.
        strategy: the best one.
    """

    own: float = 0.0
    others: float = 0.0
    rows: float = 0.0
    drafting: float = 1.0
    strategy: Strategy = TARGET_ONLY


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

    def best(self, sessions: int) -> tuple[Strategy, Cycle]:
        """The strategy that is best for all sessions where they share every step, and a session's cycle then."""
        return max(self.all(sessions).items(), key=lambda item: item[1].rate)

    def rates(self, sessions: int, pool: Cycles) -> Rates:
        """The rates where all sessions follow the strategy that is best for all; `pool`: by the statistics of all."""
        strategy, own = self.best(sessions)
        cycle = own
        if sessions > 1:  # a draft at work beside the step slows it for all, so only all together choose that
            strategy, cycle = pool.best(sessions)
        others = sessions - 1
        in_step = 1 - cycle.away_ms / cycle.ms if cycle.ms > 0 else 1.0
        drafting = sessions if strategy.depth else 1
        rows = others * strategy.rows * in_step
        return Rates(own.rate, others * cycle.rate, rows, drafting, strategy)

    def promise(self, sessions: int) -> float:
        """The gain over matches that drafts promise, where all sessions do what is best for all; 0: not known."""
        cycles = self.all(sessions)
        plain = cycles.pop(TARGET_ONLY).rate
        return max((cycle.rate for cycle in cycles.values()), default=0.0) / plain if plain else 0.0

    def all(self, sessions: int) -> dict[Strategy, Cycle]:
        """A session's cycle of every strategy, where all follow it and share every step."""
        target, others = self.target, sessions - 1
        alone_ms, sent_ms = target.steps(), target.late_send_ms.value
        cycles = {TARGET_ONLY: Cycle(1.0 + self.stats.texts.match_value.value, alone_ms(sessions))}
        if self.draft is None or not self.draft.is_known:
            return cycles
        waits_ms = self.draft.waits(sessions)[: self.most]
        for strategy, draft_ms in zip(WAIT_STRATEGIES, waits_ms, strict=False):
            step_ms = alone_ms(sessions * strategy.rows)
            cycles[strategy] = wait_cycle(self._tokens[strategy.depth], step_ms, draft_ms, sent_ms)
        if self.can_ahead:
            level_ms = self.draft.step_ms(AHEAD_ROWS * sessions)
            for strategy, draft_ms in zip(AHEAD_STRATEGIES, waits_ms, strict=False):
                rows = others * strategy.rows
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
