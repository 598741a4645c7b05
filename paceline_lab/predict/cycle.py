"""From tokens a round to tokens per second, by the closed form that the planner uses (`paceline.costs.cycle`). Pure.

What was replayed stands in place of what a planner learns. Target-only requests need no way: under a lease the target
starts their rounds by itself. A request of a fixed length has no lease: each of its rounds is sent, those without a
match, too. Of sessions that share a target those are in its step that don't wait elsewhere; where draft and target
share hardware all wait for the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from coordinator.drafting.prefetch import LAST_MS
from paceline.costs.cost_line import CostLine
from paceline.costs.cycle import (
    AHEAD_ROWS,
    Cycle,
    ahead_cycle,
    head_start_ms,
    proposal_ms,
    tokens_ahead,
)
from paceline.protocol.errors import require
from paceline.protocol.proposal import NGRAM
from paceline_lab.predict.rounds import ExpectedRounds

LOCAL_TRIP_MS = 1.0
"""Time there and back between services on one machine: the planner's value before it has measured."""
_TURNS = 60
"""Iterations of a fixed point: each halves the error, and 1e-9 of a step's time is exact enough."""


class DraftingMode(StrEnum):
    """When proposals are drafted: never, while the round waits, or before it for its likely outcomes."""

    NONE = "target-only"
    WAIT = "just in time"
    AHEAD = "ahead"


@dataclass(frozen=True)
class StepTimes:
    """Times of steps and trips, in milliseconds, and the origin of each figure.

    Attributes:
        target: time of a target's step by its rows.
        drafts: time of a draft's step by its rows, by drafter; matches need none.
        session_ms: time that each session adds to a target step beside its rows: reading its keys and values, where
            the line leaves them out; measured lines have those of a short context.
        draft_session_ms: the same of a draft's step, by drafter; no entry: 0.
        target_trip_ms, draft_trip_ms: time there and back, messages included.
        apart: whether drafts have hardware of their own; else nothing is drafted ahead.
        origins: origin of each of the above, for reports.
    """

    target: CostLine
    drafts: Mapping[str, CostLine] = field(default_factory=dict)
    session_ms: float = 0.0
    draft_session_ms: Mapping[str, float] = field(default_factory=dict)
    target_trip_ms: float = LOCAL_TRIP_MS
    draft_trip_ms: float = LOCAL_TRIP_MS
    apart: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.target.is_known, "target line", self.target.points, "one point or more")
        for name in ("session_ms", "target_trip_ms", "draft_trip_ms"):
            require(0 <= getattr(self, name) <= 1e6, name, getattr(self, name), "in [0, 1e6]")

    def step_ms(self, sessions: float, rows: float) -> float:
        """Return the time of a target step with `rows` of each of `sessions`."""
        return self.target.ms(sessions * rows) + sessions * self.session_ms

    def draft_ms(self, drafter: str, sessions: float, rows: float) -> float:
        """Return the time of a draft's step with `rows` of each of `sessions`."""
        return self.drafts[drafter].ms(sessions * rows) + sessions * self.draft_session_ms.get(drafter, 0.0)

    def slower(self, *, trips_ms: float = 0.0, draft: float = 1.0) -> StepTimes:
        """Return the times with longer trips (below 0: shorter, down to none), or with draft steps times a factor."""
        return replace(
            self,
            drafts={name: line.scale(draft) for name, line in self.drafts.items()},
            draft_session_ms={name: draft * ms for name, ms in self.draft_session_ms.items()},
            target_trip_ms=max(0.0, self.target_trip_ms + trips_ms),
            draft_trip_ms=max(0.0, self.draft_trip_ms + trips_ms),
        )


@dataclass(frozen=True)
class PredictedSpeed:
    """One setting's speed; all figures are predicted.

    Attributes:
        sessions: requests at once.
        tokens: tokens that a round commits.
        error: standard error of `tokens` from one sample of texts to another; NaN: not known.
        round_ms: time from one round of a session to its next.
        draft_ms: the part of `round_ms` that the draft's steps for this session's proposal take.
        draft_busy: share of a draft service's time that one target's sessions take.
    """

    drafter: str
    setting: str
    mode: DraftingMode
    sessions: int
    tokens: float
    round_ms: float
    draft_ms: float = 0.0
    draft_busy: float = 0.0
    error: float = 0.0

    @property
    def ms_per_token(self) -> float:
        """Return the milliseconds per token of one request."""
        return self.round_ms / self.tokens

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all sessions together."""
        return 1e3 * self.sessions / self.ms_per_token

    @property
    def name(self) -> str:
        """Return the setting's name in words."""
        if self.mode is DraftingMode.NONE:
            return self.mode.value
        return f"{self.setting} with {self.drafter}" + (", ahead" if self.mode is DraftingMode.AHEAD else "")

    def gain(self, plain: PredictedSpeed) -> float:
        """Return tokens per second over another setting's."""
        return self.tokens_per_second / plain.tokens_per_second

    def gain_error(self, plain: PredictedSpeed) -> float:
        """Return the standard error of `gain` that comes of the texts; errors of the times are not in it."""
        return self.gain(plain) * self.error / self.tokens


def target_only(times: StepTimes, sessions: int) -> PredictedSpeed:
    """Predict the speed without any draft."""
    return PredictedSpeed("", "k=0", DraftingMode.NONE, sessions, 1.0, times.step_ms(sessions, 1))


def just_in_time(times: StepTimes, drafter: str, rounds: ExpectedRounds, sessions: int) -> PredictedSpeed:
    """Predict rounds that wait for their proposals and the way to the target; matches are at hand."""
    draft_ms = draft_time_ms(times, drafter, rounds, sessions)
    away_ms = draft_ms + times.target_trip_ms + (0.0 if drafter == NGRAM else times.draft_trip_ms)
    round_ms = away_ms + _step_ms(times, rounds, sessions, away_ms)
    busy = min(1.0, draft_ms / round_ms)
    name, mode = rounds.shape.name, DraftingMode.WAIT
    return PredictedSpeed(drafter, name, mode, sessions, rounds.tokens, round_ms, draft_ms, busy, rounds.error)


def ahead(
    times: StepTimes, drafter: str, rounds_of: Callable[[int], ExpectedRounds], depth: int, sessions: int
) -> PredictedSpeed:
    """Predict chains of `depth` tokens, drafted for a round's likely outcomes while the target verifies it.

    A miss waits as `just_in_time` does. The draft works all the time.
    """
    whole = rounds_of(depth)
    waiting = replace(just_in_time(times, drafter, whole, sessions), mode=DraftingMode.AHEAD, draft_busy=1.0)
    missed_away_ms = waiting.draft_ms + times.draft_trip_ms + times.target_trip_ms
    step_ms = _step_ms(times, whole, sessions, (1 - whole.hits) * missed_away_ms)
    tokens, hit_away_ms = _ahead_tokens(times, drafter, step_ms, depth, sessions, missed_away_ms)
    step_ms = _step_ms(times, whole, sessions, whole.hits * hit_away_ms + (1 - whole.hits) * missed_away_ms)
    hit = Cycle(rounds_of(tokens).tokens, step_ms + hit_away_ms)
    cycle = ahead_cycle(whole.hits, hit, [Cycle(whole.tokens, step_ms + missed_away_ms)])
    return replace(waiting, tokens=cycle.tokens, round_ms=cycle.ms)


def _ahead_tokens(
    times: StepTimes, drafter: str, step_ms: float, depth: int, sessions: int, missed_away_ms: float
) -> tuple[int, float]:
    """Return how many tokens of an outcome's proposal are there when the outcome is, and the round's wait then.

    They are prefetched, if that leaves time for one: there and back to draft and target, and the margin before the
    verdict. What comes later waits at the coordinator, and its round goes to the target. Where the outcome comes
    first, the round waits for what is being drafted for it, less long than for what has yet to begin.
    """
    level_ms = times.draft_ms(drafter, sessions, AHEAD_ROWS)
    at_coordinator_ms = step_ms + times.target_trip_ms - times.draft_trip_ms
    at_target_ms = at_coordinator_ms - 2 * times.target_trip_ms - LAST_MS
    prefetch_tokens, coordinator_tokens = (
        tokens_ahead(room_ms, level_ms, depth) for room_ms in (at_target_ms, at_coordinator_ms)
    )
    if prefetch_tokens:
        return prefetch_tokens, 0.0
    if coordinator_tokens:
        return coordinator_tokens, times.target_trip_ms
    return depth, missed_away_ms - head_start_ms(at_coordinator_ms, level_ms)


def draft_time_ms(times: StepTimes, drafter: str, rounds: ExpectedRounds, sessions: int) -> float:
    """Return the time of the draft's steps for one proposal, of all sessions that draft together."""
    if drafter == NGRAM or not rounds.shape.depth:
        return 0.0
    levels = [rounds.shape.level(depth) for depth in range(1, rounds.shape.depth)]
    return proposal_ms(partial(times.draft_ms, drafter, sessions), levels)[-1]


def _step_ms(times: StepTimes, rounds: ExpectedRounds, sessions: int, away_ms: float) -> float:
    """Return the time of a target step with the rows of the sessions that are in it."""
    if sessions == 1:
        return sum(share * times.step_ms(1, 1 + nodes) for nodes, share in rounds.proposed)
    rows = 1 + rounds.nodes
    if not times.apart:  # all wait for the same hardware, and step together
        return times.step_ms(sessions, rows)
    return shared_step_ms(lambda inside: times.step_ms(inside, rows), sessions, away_ms)


def shared_step_ms(step_ms: Callable[[float], float], sessions: float, away_ms: float) -> float:
    """Milliseconds of a step that holds those of all sessions that are not away.

    Their number decides the step's rows and so its time, and that decides the number: a fixed point.

    Args:
        step_ms: of a step by the number of sessions in it.
        sessions: of which each is away for `away_ms` in each of its rounds.
    """
    inside = sessions
    for _ in range(_TURNS):
        ms = step_ms(max(1.0, inside))
        inside = (inside + sessions * ms / (ms + away_ms)) / 2
    return step_ms(max(1.0, inside))
