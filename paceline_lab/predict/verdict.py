"""The setting to run, whether it pays, and what would turn the verdict. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from paceline.protocol.errors import require
from paceline.protocol.proposal import NGRAM
from paceline_lab.predict.cycle import (
    PredictedSpeed,
    StepTimes,
    ahead,
    draft_time_ms,
    just_in_time,
    target_only,
)
from paceline_lab.predict.positions import DrafterPositions
from paceline_lab.predict.rounds import ExpectedRounds, ProposalShape, expected_rounds, longest_depth, plus_minus

LEAST_GAIN = 1.03
"""Least speed-up that counts as a gain: a request's account may lose 3 % to drafting (docs/architecture.md)."""
MOST_SCALE = 4.0
MOST_TRIP_MS = 1000.0
MOST_SESSIONS = 1024
_HALVINGS = 16
"""Halvings of an interval that holds a turning point: 1 in 65,536 of it is left."""


def is_gain(gain: float) -> bool:
    """Return whether a speed over target-only's is a gain, so that the setting pays."""
    return gain >= LEAST_GAIN


@dataclass(frozen=True)
class Candidates:
    """Every drafter's positions at one temperature, and the settings to compare.

    Attributes:
        positions: each drafter's positions in every text.
        shapes: chains and trees to compare.
    """

    positions: Mapping[str, Sequence[DrafterPositions]]
    shapes: tuple[ProposalShape, ...]

    def __post_init__(self) -> None:
        require(bool(self.shapes), "k", self.shapes, "one or more")

    @cached_property
    def _rounds(self) -> Callable[[str, ProposalShape, float], ExpectedRounds]:
        return lru_cache(maxsize=None)(
            lambda drafter, shape, scale: expected_rounds(self.positions[drafter], shape, scale)
        )

    def rounds_of(self, drafter: str, shape: ProposalShape, scale: float = 1.0) -> ExpectedRounds:
        """Return the expected rounds of one shape."""
        return self._rounds(drafter, shape, scale)

    def shapes_of(self, drafter: str) -> list[ProposalShape]:
        """Return the shapes that are no deeper than the drafter's positions; those of matches are chains."""
        most = longest_depth(self.positions[drafter])
        return [each for each in self.shapes if 0 < each.depth <= most and not (drafter == NGRAM and each.widths)]

    def speeds(self, times: StepTimes, sessions: int, scale: float = 1.0) -> Iterator[PredictedSpeed]:
        """Yield the speed of target-only, then of every setting."""
        yield target_only(times, sessions)
        for drafter in self.positions:
            for shape in self.shapes_of(drafter):
                yield just_in_time(times, drafter, self.rounds_of(drafter, shape, scale), sessions)
                if times.apart and self._can_ahead(drafter, shape):
                    yield ahead(times, drafter, self._by_depth(drafter, scale), shape.depth, sessions)

    def best(self, times: StepTimes, sessions: int, scale: float = 1.0) -> tuple[PredictedSpeed, float]:
        """Return the fastest setting that drafts, and its gain over target-only."""
        plain, *drafted = self.speeds(times, sessions, scale)
        best = max(drafted, key=lambda each: each.tokens_per_second)
        return best, best.gain(plain)

    def _can_ahead(self, drafter: str, shape: ProposalShape) -> bool:
        """Return whether outcomes can be drafted for: only in chains, and by drafters that read no features."""
        by_depth = any(each.reach.shape[1] > 1 for each in self.positions[drafter])
        return drafter != NGRAM and not shape.widths and not by_depth

    def _by_depth(self, drafter: str, scale: float) -> Callable[[int], ExpectedRounds]:
        return lambda depth: self.rounds_of(drafter, ProposalShape(depth), scale)


@dataclass(frozen=True)
class ProfitInequality:
    """A round must take less than target-only takes for its tokens: ways + drafting + t(1 + k) < E · t(1).

    The condition of synchronous remote drafting (arXiv 2606.25091), of one session. It holds where the right side is
    greater by a gain, as everywhere else.
    """

    trip_ms: float
    draft_ms: float
    verify_ms: float
    tokens: float
    single_ms: float

    @property
    def holds(self) -> bool:
        """Return whether drafting pays."""
        return is_gain(self.gain)

    @property
    def gain(self) -> float:
        """Return the right side over the left one."""
        return self.right_ms / self.left_ms

    @property
    def left_ms(self) -> float:
        """Return the time of a round."""
        return self.trip_ms + self.draft_ms + self.verify_ms

    @property
    def right_ms(self) -> float:
        """Return the time of as many tokens target-only."""
        return self.tokens * self.single_ms


def profit_inequality(times: StepTimes, drafter: str, rounds: ExpectedRounds) -> ProfitInequality:
    """Return the inequality of one setting, drafted just in time."""
    speed = just_in_time(times, drafter, rounds, 1)
    draft_ms = draft_time_ms(times, drafter, rounds, 1)
    verify_ms = sum(share * times.step_ms(1, 1 + nodes) for nodes, share in rounds.proposed)
    trips_ms = speed.round_ms - draft_ms - verify_ms
    return ProfitInequality(trips_ms, draft_ms, verify_ms, rounds.tokens, times.step_ms(1, 1))


@dataclass(frozen=True)
class TurningPoints:
    """Values at which the verdict turns, with the best setting chosen anew at each; None: it doesn't, in the range.

    Attributes:
        acceptance: factor on every chance of acceptance; up to `MOST_SCALE`.
        trips_ms: addition to each of both trips; up to `MOST_TRIP_MS`. Below 0: so much less.
        sessions: requests at once; up to `MOST_SESSIONS`, in powers of two.
        draft: factor on the draft's steps, down to 0 or up to 100.
    """

    acceptance: float | None
    trips_ms: float | None
    sessions: int | None
    draft: float | None


def turning_points(candidates: Candidates, times: StepTimes, sessions: int) -> TurningPoints:
    """Find the acceptance, trips, load and draft speed that would turn the verdict at the given times and load."""

    def pays(scale: float = 1.0, at: StepTimes = times, load: int = sessions) -> bool:
        return is_gain(candidates.best(at, load, scale)[1])

    now = pays()
    nearest_ms = -max(times.target_trip_ms, times.draft_trip_ms)
    loads = [1 << power for power in range(MOST_SESSIONS.bit_length()) if (1 << power) >= sessions or not now]
    return TurningPoints(
        acceptance=_turn(lambda scale: pays(scale), 1.0, 0.0 if now else MOST_SCALE),
        trips_ms=_turn(lambda more: pays(at=times.slower(trips_ms=more)), 0.0, MOST_TRIP_MS if now else nearest_ms),
        sessions=next((load for load in loads if pays(load=load) != now), None),
        draft=_turn(lambda factor: pays(at=times.slower(draft=factor)), 1.0, 100.0 if now else 0.0),
    )


def _turn(pays: Callable[[float], bool], now: float, end: float) -> float | None:
    """Find the value between two at which the answer changes; None: it is the same at both."""
    before = pays(now)
    if pays(end) == before:
        return None
    low, high = now, end
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(middle) == before else (low, middle)
    return high


@dataclass(frozen=True)
class PlanVerdict:
    """The setting to run at one temperature and load."""

    best: PredictedSpeed
    plain: PredictedSpeed
    gain: float

    @property
    def error(self) -> float:
        """Return the standard error of the gain from one sample of texts to another; NaN: not known."""
        return self.best.gain_error(self.plain)

    @property
    def pays(self) -> bool:
        """Return whether the setting pays."""
        return is_gain(self.gain)

    @property
    def is_sure(self) -> bool:
        """Return whether the gain is over two standard errors from the bound, so that other texts hardly turn it."""
        return abs(self.gain - LEAST_GAIN) > 2 * self.error

    @property
    def words(self) -> str:
        """Return the recommendation in words."""
        gain = f"{self.gain:.2f}×{plus_minus(self.error)} target-only"
        doubt = "" if self.is_sure else "; too near to call with these texts"
        if math.isnan(self.error):
            doubt = "; how much texts differ is not known of so few"
        if self.pays:
            return f"{self.best.name}: {gain}{doubt}"
        return f"don't draft: the best setting, {self.best.name}, brings {gain}{doubt}"


def verdict_of(candidates: Candidates, times: StepTimes, sessions: int) -> PlanVerdict:
    """Return the verdict on the fastest setting."""
    best, gain = candidates.best(times, sessions)
    return PlanVerdict(best, target_only(times, sessions), gain)
