"""The cycles that a session can run, and the balance of those that share a target. Pure.

A token costs a wait only where it is drafted just in time; a row costs all who share the step. What the others do
decides both. So each plan is judged as if all followed it, and the one of greatest goodput says what time is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from coordinator.policy.acceptance_stats import AcceptanceStats
from coordinator.policy.plan import Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from paceline.costs.acceptance import MAX_DEPTH
from paceline.costs.cycle import AHEAD_ROWS, Cycle, ahead_cycle, head_start_ms, tokens_ahead
from paceline.costs.goodput import load_of


@dataclass(frozen=True)
class Strategy:
    """How rounds are run: source and length of most proposals, and whether a round with none in time `goes_on`."""

    source: Source = Source.NONE
    depth: int = 0
    goes_on: bool = False


TARGET_ONLY = Strategy()


@dataclass(frozen=True)
class Rates:
    """The worth of time in tokens a millisecond, and the load by the other sessions of the steps.

    Attributes:
        own, others: of this request at its best, and of all the others together.
        rows: the others' rows in a step.
        strategy: the best one.
        promise: the gain over matches that drafts promise, where all sessions do what is best for all; 0: not known.
    """

    own: float = 0.0
    others: float = 0.0
    rows: float = 0.0
    strategy: Strategy = TARGET_ONLY
    promise: float = 0.0


@dataclass(frozen=True)
class Cycles:
    """The cycles that a session could run.

    Attributes:
        target, draft: their times; draft None: no model drafts.
        stats: the drafter's acceptance statistics.
        can_ahead, can_go_on: whether outcomes may be drafted for; whether the target starts rounds without proposals.
    """

    target: TargetTimes
    draft: DraftTimes | None
    stats: AcceptanceStats
    can_ahead: bool = False
    can_go_on: bool = False

    def rates(self, pool: AcceptanceStats, *, drafts: bool, promises: bool) -> Rates:
        """The rates where all do what is best. `pool`: of all; `promises`: say those of drafts at rest."""
        others, of_all = self.target.sessions - 1, replace(self, stats=pool).all(drafts=drafts or promises)
        own = best = _best(of_all if drafts and pool is self.stats else self.all(drafts=drafts))
        if others:  # a draft at work beside the step slows it for all, so only all together choose that
            best = _best(of_all if drafts else {TARGET_ONLY: of_all[TARGET_ONLY]})
        plain, *with_drafts = (cycle.rate for cycle in of_all.values())
        promise = max(with_drafts, default=0.0) / plain if plain else 0.0
        return Rates(own[1].rate, others * best[1].rate, others * (1 + best[0].depth), best[0], promise)

    def all(self, *, drafts: bool = True) -> dict[Strategy, Cycle]:
        """A session's cycle of every strategy, where all follow it and share every step."""
        target, sessions, alone_ms = self.target, self.target.sessions, self.target.steps()
        cycles = {TARGET_ONLY: Cycle(1.0 + self.stats.texts.match_value.value, alone_ms(sessions))}
        if not drafts or self.draft is None or not self.draft.step_ms(1):
            return cycles
        level_ms = self.draft.step_ms(AHEAD_ROWS * sessions, beside=True)
        for depth, draft_ms in enumerate(self.draft.waits(sessions), 1):
            step_ms = alone_ms(sessions * (1 + depth))
            late_ms = target.late_ms(step_ms / 2)  # all wait; below, others go on, and who is late misses a step
            cycles[Strategy(Source.WAIT, depth)] = Cycle(self._tokens[depth], draft_ms + late_ms + step_ms)
            if self.can_ahead:
                goes_on, cycle = self._ahead_cycle(depth, draft_ms + target.late_ms(step_ms), level_ms)
                cycles[Strategy(Source.CACHED, depth, goes_on)] = cycle
        return cycles

    @cached_property
    def _hits(self) -> tuple[float, float]:
        """Share of rounds whose outcome has a proposal, at the coordinator and at the target."""
        by_load, load = self.stats.hits, load_of(self.target.sessions)
        return by_load[load, False].value, by_load[load, True].value

    @cached_property
    def _tokens(self) -> list[float]:
        """Tokens that a round commits, the target's own included, by the length of its proposal from 0 on."""
        return [*accumulate(self.stats.tokens.reach(MAX_DEPTH), initial=1.0)]

    def _ahead_cycle(self, depth: int, wait_ms: float, level_ms: float) -> tuple[bool, Cycle]:
        """The cycle with outcome drafting, and whether its misses go on without a draft."""
        tokens, others, send_ms = self._tokens, self.target.sessions - 1, self.target.send_ms.value
        beside_ms = self.target.steps(beside=True)
        step_ms, without_ms = beside_ms((1 + others) * (1 + depth)), beside_ms(others * (1 + depth) + 1)
        drafted = tokens_ahead(step_ms, level_ms, depth)
        hits, prefetch_hits = self._hits if drafted else (0.0, 0.0)
        wait_ms = max(0.0, wait_ms - head_start_ms(step_ms, level_ms))
        hit, waiting = Cycle(tokens[drafted], step_ms), Cycle(tokens[depth], wait_ms + step_ms)
        cycle = ahead_cycle(hits, hit, (Cycle(1.0, without_ms + send_ms), waiting))
        cycle = Cycle(cycle.tokens, cycle.ms + max(0.0, hits - prefetch_hits) * send_ms)
        going_on = ahead_cycle(prefetch_hits, hit, (Cycle(1.0, without_ms),))
        return (True, going_on) if self.can_go_on and going_on.rate >= cycle.rate else (False, cycle)


def _best(cycles: Mapping[Strategy, Cycle]) -> tuple[Strategy, Cycle]:
    return max(cycles.items(), key=lambda item: item[1].rate)
