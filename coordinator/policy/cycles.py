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


class Cycle(NamedTuple):
    """From one round to the next: tokens committed, and milliseconds: all, those not in a step, those of a draft."""

    way: Way
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

    def all(self, around: Surroundings = ALONE) -> list[Cycle]:
        """Every way, in surroundings that stay as they are."""
        return self._cycles([around.rows] * (1 + MAX_DEPTH), around.drafting)

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
        """A session's cycle where all of so many do what is best for all together: they share every step."""
        others = sessions - 1
        rows = [others * (1 + depth) for depth in range(1 + MAX_DEPTH)]
        return max(self._cycles(rows, sessions), key=attrgetter("rate"))

    def _cycles(self, others: Sequence[float], drafting: float) -> list[Cycle]:
        """Every way.

        Args:
            others: rows of the others in a step, by the depth of the way.
            drafting: sessions that draft at once.
        """
        copied = self.seen.texts.copied.value
        found = [Cycle(TARGET_ONLY, 1.0 + copied, self._alone_ms(others[0] + 1))]
        if self.draft is not None and self.draft.is_known:
            waits = self.draft.waits(drafting)
            waits_ms = [waits(depth) for depth in range(1, min(self.most, MAX_DEPTH) + 1)]
            found += self._waiting(others[1:], waits_ms)
            if self.can_ahead:
                found += self._ahead(others[1:], waits_ms, self.draft.step_ms(AHEAD_ROWS * drafting))
        return found

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

    def _waiting(self, others: Sequence[float], waits_ms: Sequence[float]) -> Iterator[Cycle]:
        tokens, alone_ms, sent_ms = self._tokens, self._alone_ms, self.target.sent_late.value
        for way, rows, draft_ms in zip(WAITING, others, waits_ms, strict=False):
            away_ms = draft_ms + sent_ms
            yield Cycle(way, tokens[way.depth], away_ms + alone_ms(rows + 1 + way.depth), away_ms, draft_ms)

    def _ahead(self, others: Sequence[float], waits_ms: Sequence[float], level_ms: float) -> Iterator[Cycle]:
        """Hits wait for nothing, misses for the draft, or go without where that is faster.

        To guess the token behind a proposal needs the row of its last token, so n tokens ahead take n + 1 steps.
        """
        tokens, beside_ms, target = self._tokens, self._beside_ms, self.target
        sent_ms, late_ms, hit_length = target.sent.value, target.sent_late.value, self.seen.hit_length
        for way, rows, draft_ms in zip(AHEAD, others, waits_ms, strict=False):
            depth = way.depth
            step_ms = beside_ms(rows + 1 + depth)
            drafted = min(depth, max(0, int(step_ms / level_ms) - 1)) if level_ms > 0 else depth
            if hit_length.weight:
                drafted = min(depth, round(hit_length.value))
            hits = self.seen.hits.value if drafted else 0.0
            missed, missed_ms = 1.0, beside_ms(rows + 1) + sent_ms
            waited_ms = draft_ms + late_ms + step_ms
            if _rate(tokens[depth], waited_ms) > _rate(missed, missed_ms):
                missed, missed_ms = tokens[depth], waited_ms
            cycle_tokens = hits * tokens[drafted] + (1 - hits) * missed
            cycle_ms = hits * step_ms + (1 - hits) * missed_ms
            yield Cycle(way, cycle_tokens, cycle_ms, (1 - hits) * max(0.0, missed_ms - step_ms))


def _rate(tokens: float, ms: float) -> float:
    return tokens / ms if ms > 0 else 0.0
