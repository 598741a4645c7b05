"""The closed form of a cycle: what a session commits from one round to the next, and how long that takes. Pure.

A token costs a wait only where it is drafted just in time. A row costs all who share the step. What the others do
decides what either costs, so there is more than one balance: where nobody waits, steps are small and waiting is
dear; where all wait, steps are full and it is cheap. So the balance of each plan that all follow together is worked
out, the one of greatest goodput is taken, and each session then chooses for itself against it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from coordinator.policy.acceptance_stats import AcceptanceStats
from coordinator.policy.plan import Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from paceline.costs.acceptance import MAX_DEPTH, survival

AHEAD_ROWS = 4.0
"""Rows of a session in a step that drafts for outcomes: the likeliest ones of a round with the usual fan-out of 4."""


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


class Cycle(NamedTuple):
    """From one round to the next: tokens committed, and milliseconds in all, outside of steps, and of the draft."""

    strategy: Strategy
    tokens: float
    ms: float
    away_ms: float = 0.0
    draft_ms: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a millisecond; 0 before any time is known."""
        return _rate(self.tokens, self.ms)


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

    def all(self, around: Surroundings = NO_OTHERS) -> list[Cycle]:
        """The cycle of every strategy, under a load that does not change with it."""
        return self._cycles([around.rows] * (1 + MAX_DEPTH), around.drafting)

    def balance(self, sessions: int) -> Surroundings:
        """The load by the others where all sessions follow the strategy that is best for all together."""
        if sessions <= 1:
            return NO_OTHERS
        best = self.best_common_cycle(sessions)
        others = sessions - 1
        in_step = 1 - best.away_ms / best.ms if best.ms > 0 else 1.0
        drafting = sessions if best.strategy.source is not Source.NONE else 1
        rows = others * best.strategy.rows * in_step
        return Surroundings(sessions, rows, others * best.rate, drafting, best.strategy.drafts_ahead)

    def best_common_cycle(self, sessions: int) -> Cycle:
        """A session's cycle where all sessions follow the strategy that is best for all: they share every step."""
        others = sessions - 1
        rows = [others * (1 + depth) for depth in range(1 + MAX_DEPTH)]
        return max(self._cycles(rows, sessions), key=attrgetter("rate"))

    def _cycles(self, others: Sequence[float], drafting: float) -> list[Cycle]:
        """The cycle of every strategy.

        Args:
            others: the others' rows in a step, by the depth of the strategy.
            drafting: the number of sessions that draft at once.
        """
        match_value = self.stats.texts.match_value.value
        cycles = [Cycle(TARGET_ONLY, 1.0 + match_value, self._alone_ms(others[0] + 1))]
        if self.draft is not None and self.draft.is_known:
            waits = self.draft.waits(drafting)
            waits_ms = [waits(depth) for depth in range(1, min(self.most, MAX_DEPTH) + 1)]
            cycles += self._wait_cycles(others[1:], waits_ms)
            if self.can_ahead:
                cycles += self._ahead_cycles(others[1:], waits_ms, self.draft.step_ms(AHEAD_ROWS * drafting))
        return cycles

    @cached_property
    def _tokens(self) -> list[float]:
        """Expected tokens of a round by the length of its proposal."""
        chances = survival(self.stats.tokens.chances(min(self.most, MAX_DEPTH)))
        return [1.0, *(1.0 + total for total in itertools.accumulate(chances))]

    @cached_property
    def _alone_ms(self) -> Callable[[float], float]:
        return self.target.steps()

    @cached_property
    def _beside_ms(self) -> Callable[[float], float]:
        return self.target.steps(beside=True)

    def _wait_cycles(self, others: Sequence[float], waits_ms: Sequence[float]) -> Iterator[Cycle]:
        tokens, alone_ms, sent_ms = self._tokens, self._alone_ms, self.target.late_send_ms.value
        for strategy, rows, draft_ms in zip(WAIT_STRATEGIES, others, waits_ms, strict=False):
            away_ms = draft_ms + sent_ms
            yield Cycle(
                strategy, tokens[strategy.depth], away_ms + alone_ms(rows + 1 + strategy.depth), away_ms, draft_ms
            )

    def _ahead_cycles(self, others: Sequence[float], waits_ms: Sequence[float], level_ms: float) -> Iterator[Cycle]:
        """Cycles with outcome drafting. Hits wait for nothing; misses wait for the draft or go without, if faster.

        A guess at the token after a proposal needs the row of its last token, so n tokens ahead take n + 1 steps.
        """
        tokens, beside_ms, target = self._tokens, self._beside_ms, self.target
        sent_ms, late_ms, hit_length = target.send_ms.value, target.late_send_ms.value, self.stats.hit_length
        for strategy, rows, draft_ms in zip(AHEAD_STRATEGIES, others, waits_ms, strict=False):
            depth = strategy.depth
            step_ms = beside_ms(rows + 1 + depth)
            drafted = min(depth, max(0, int(step_ms / level_ms) - 1)) if level_ms > 0 else depth
            if hit_length.weight:
                drafted = min(depth, round(hit_length.value))
            hits = self.stats.hits.value if drafted else 0.0
            miss_tokens, miss_ms = 1.0, beside_ms(rows + 1) + sent_ms
            waited_ms = draft_ms + late_ms + step_ms
            if _rate(tokens[depth], waited_ms) > _rate(miss_tokens, miss_ms):
                miss_tokens, miss_ms = tokens[depth], waited_ms
            cycle_tokens = hits * tokens[drafted] + (1 - hits) * miss_tokens
            cycle_ms = hits * step_ms + (1 - hits) * miss_ms
            yield Cycle(strategy, cycle_tokens, cycle_ms, (1 - hits) * max(0.0, miss_ms - step_ms))


def _rate(tokens: float, ms: float) -> float:
    return tokens / ms if ms > 0 else 0.0
