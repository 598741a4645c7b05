"""The closed form of a cycle: what a session commits from one round to the next, and how long that takes. Pure.

A token costs a wait only where it is drafted just in time. A row costs all who share the step. What the others do
decides what either costs, so there is more than one balance: where nobody waits, steps are small and waiting is
dear; where all wait, steps are full and it is cheap. So the balance of each plan that all follow together is worked
out, the one of greatest goodput is taken, and each session then chooses for itself against it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from coordinator.policy.plan import Source
from coordinator.policy.round_times import DraftTimes, TargetTimes
from coordinator.policy.seen import MAX_DEPTH, Seen, survival

AHEAD_ROWS = 4.0
"""Rows of a session in a step that drafts for outcomes: the likeliest ones of a round with the usual fan-out of 4."""


@dataclass(frozen=True)
class Way:
    """A way to run rounds: the source of most proposals and their length, with outcomes drafted meanwhile or not."""

    source: Source = Source.NONE
    depth: int = 0
    ahead: bool = False

    @property
    def rows(self) -> int:
        """Of a session in a step."""
        return 1 + self.depth


TARGET_ONLY = Way()
WAITING = tuple(Way(Source.WAIT, depth) for depth in range(1, MAX_DEPTH + 1))
AHEAD = tuple(Way(Source.CACHED, depth, ahead=True) for depth in range(1, MAX_DEPTH + 1))


@dataclass(frozen=True)
class Cycle:
    """From one round to the next: tokens committed, and milliseconds: all, those not in a step, those of a draft."""

    way: Way
    tokens: float
    ms: float
    away_ms: float = 0.0
    draft_ms: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a millisecond; 0 before any time is known."""
        return self.tokens / self.ms if self.ms > 0 else 0.0


@dataclass(frozen=True)
class Surroundings:
    """What others do to a session's rounds.

    Attributes:
        sessions: that share the steps, this one included.
        rows: of the others in a step.
        rate: tokens a millisecond of all the others.
        drafting: sessions that draft at once, this one included.
        ahead: whether they draft for outcomes: then the draft is at work beside every step.
    """

    sessions: int = 1
    rows: float = 0.0
    rate: float = 0.0
    drafting: float = 1.0
    ahead: bool = False


ALONE = Surroundings()


@dataclass(frozen=True)
class Cycles:
    """The cycles that a session could run.

    Attributes:
        target, draft: what things take; draft None: no model drafts.
        seen: what is known of the drafter's tokens.
        most: longest proposal.
        can_ahead: whether outcomes may be drafted for.
    """

    target: TargetTimes
    draft: DraftTimes | None
    seen: Seen
    most: int = MAX_DEPTH
    can_ahead: bool = False

    def all(self, around: Surroundings = ALONE) -> Iterator[Cycle]:
        """Every way, in surroundings that stay as they are."""
        return (self._cycle(way, around) for way in self._ways())

    def balanced(self, sessions: int) -> Surroundings:
        """What the others do where all of so many do what is best for all together."""
        if sessions <= 1:
            return ALONE
        best = self.together(sessions)
        others = sessions - 1
        in_step = 1 - best.away_ms / best.ms if best.ms > 0 else 1.0
        drafting = sessions if best.way.source is not Source.NONE else 1
        rows = others * best.way.rows * in_step
        return Surroundings(sessions, rows, others * best.rate, drafting, best.way.ahead)

    def together(self, sessions: int) -> Cycle:
        """A session's cycle where all of so many do what is best for all together."""
        return max((self._together(way, sessions) for way in self._ways()), key=lambda cycle: cycle.rate)

    def _ways(self) -> Iterator[Way]:
        yield TARGET_ONLY
        if self.draft is not None and self.draft.is_known:
            most = min(self.most, MAX_DEPTH)
            yield from WAITING[:most]
            if self.can_ahead:
                yield from AHEAD[:most]

    def _together(self, way: Way, sessions: int) -> Cycle:
        """A session's cycle where all follow the same way and share every step."""
        around = Surroundings(sessions, (sessions - 1) * way.rows, 0.0, sessions)
        return self._cycle(way, around)

    @cached_property
    def _tokens(self) -> list[float]:
        """Expected tokens of a round by the length of its proposal."""
        reached = survival(self.seen.chances(min(self.most, MAX_DEPTH)))
        return [1.0, *(1.0 + total for total in itertools.accumulate(reached))]

    @cached_property
    def _alone_ms(self) -> Callable[[float], float]:
        return self.target.steps()

    @cached_property
    def _beside_ms(self) -> Callable[[float], float]:
        return self.target.steps(beside=True)

    @cached_property
    def _of_drafting(self) -> dict[float, tuple[Callable[[int], float], float]]:
        """By how many draft at once: waits by depth, and a step that drafts for outcomes."""
        return {}

    def _drafting(self, draft: DraftTimes, drafting: float) -> tuple[Callable[[int], float], float]:
        found = self._of_drafting.get(drafting)
        if found is None:
            found = self._of_drafting[drafting] = draft.waits(drafting), draft.step_ms(AHEAD_ROWS * drafting)
        return found

    def _cycle(self, way: Way, around: Surroundings) -> Cycle:
        if self.draft is None or way.source is Source.NONE:
            return self._none(around)
        if way.ahead:
            return self._ahead(self.draft, way, self._tokens, around)
        return self._waiting(self.draft, way, self._tokens[way.depth], around)

    def _none(self, around: Surroundings) -> Cycle:
        return Cycle(TARGET_ONLY, 1.0 + self.seen.texts.copied.value, self._alone_ms(around.rows + 1))

    def _waiting(self, draft: DraftTimes, way: Way, tokens: float, around: Surroundings) -> Cycle:
        draft_ms = self._drafting(draft, around.drafting)[0](way.depth)
        away_ms = draft_ms + self.target.sent_late.value
        step_ms = self._alone_ms(around.rows + 1 + way.depth)
        return Cycle(way, tokens, away_ms + step_ms, away_ms, draft_ms)

    def _ahead(self, draft: DraftTimes, way: Way, tokens: list[float], around: Surroundings) -> Cycle:
        """Hits wait for nothing, misses for the draft, or go without where that is faster.

        To guess the token behind a proposal needs the row of its last token, so n tokens ahead take n + 1 steps.
        """
        depth, step_ms = way.depth, self._beside_ms(around.rows + 1 + way.depth)
        level_ms = self._drafting(draft, around.drafting)[1]
        drafted = min(depth, max(0, int(step_ms / level_ms) - 1)) if level_ms > 0 else depth
        if self.seen.hit_length.weight:
            drafted = min(depth, round(self.seen.hit_length.value))
        hits = self.seen.hits.value if drafted else 0.0
        wait_ms = self._drafting(draft, around.drafting)[0](depth) + self.target.sent_late.value
        missed_tokens, missed_ms = max(
            (1.0, self._beside_ms(around.rows + 1) + self.target.sent.value),
            (tokens[depth], wait_ms + step_ms),
            key=lambda each: each[0] / each[1] if each[1] > 0 else 0.0,
        )
        return Cycle(
            way,
            hits * tokens[drafted] + (1 - hits) * missed_tokens,
            hits * step_ms + (1 - hits) * missed_ms,
            (1 - hits) * max(0.0, missed_ms - step_ms),
        )
