"""Why a request was drafted for in one way and not another: the planner's knowledge, and its value of each way."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.errors import require

EXPLAINED_ROWS = (1, 2, 4, 8)
"""Rows of a target step whose time an explanation states."""
MAX_CANDIDATES = 64
MAX_EXPLAINED_DEPTH = 64
MAX_MODES = 16


@dataclass(frozen=True)
class CandidateExplanation:
    """One way to run a round, as the planner valued it last.

    Attributes:
        name: `none`, `ngram`, `wait` (drafted just in time) or `ahead` (drafted before its outcome was known). No
            enum: a newer coordinator may know more ways than the client that shows them.
        draft_tokens: longest path that it proposes; 0 for `none`, and of matches, whose lengths differ, the mean.
        tokens: expected committed tokens of a round; of matches the mean of those that were proposed.
        ms: expected milliseconds of a round; of matches the same mean, 0 where none was proposed yet.
        rounds: rounds of this request that ran in this way.
    """

    name: str
    draft_tokens: int = 0
    tokens: float = 0.0
    ms: float = 0.0
    rounds: int = 0

    @property
    def tokens_per_second(self) -> float:
        """What the planner expects of it; 0 where no time is known."""
        return 1e3 * self.tokens / self.ms if self.ms > 0 else 0.0


@dataclass(frozen=True)
class ModeReport:
    """What is known of one mode of a group.

    Attributes:
        name: `rest`, `matches` or `drafts`. No enum, for the reason that `CandidateExplanation.name` is none.
        state: `runs`; `waits` for its turn to be looked at; `paused`, since it lost more than it may;
            `unpromising`: it is not worth a trial. No enum, either.
        gain: tokens that it committed beside those of resting in the same time, as it ran last; None: it never
            did, or it is rest.
        wait_steps: steps of rest until its turn or the end of its pause; 0: it runs, or is not worth it.
    """

    name: str
    state: str
    gain: float | None = None
    wait_steps: float = 0.0


@dataclass(frozen=True)
class GroupReport:
    """What the requests of a coordinator that share a target do together, for metrics, explanations and the page.

    Attributes:
        mode: the one that they are in, or would be in if as many shared the target as did last.
        mode_steps: steps of rest that fit into the time since another mode ran.
        sessions: that share the target, of all coordinators; one alone has its own account.
        promise: gain over matches that drafts promise by the planner's closed form; 0: not worked out yet.
        promise_bound: the promise above which drafts are tried.
        modes: every one.
    """

    mode: str
    mode_steps: float = 0.0
    sessions: int = 0
    promise: float = 0.0
    promise_bound: float = 0.0
    modes: tuple[ModeReport, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.modes) <= MAX_MODES, "modes", len(self.modes), f"at most {MAX_MODES}")


@dataclass(frozen=True)
class PlanExplanation:
    """What a request's planner knew when the request ended, and what it had chosen.

    Attributes:
        target_alone_ms: duration of a target step of `EXPLAINED_ROWS` rows while no draft works; empty: not known.
        target_beside_ms: the same while a draft works.
        draft_ms: duration of a draft step of one row; 0: not known, or no draft.
        target_trip_ms: time to the target and back, without its work.
        draft_trip_ms: the same of the draft.
        target_sessions: sessions that share the target's steps, this one included, of all coordinators.
        positions: committed positions from which the draft's acceptance is known.
        acceptance: chance that the first 1, 2, … tokens of a draft's chain are all accepted.
        ngram_acceptance: the same of an n-gram match.
        candidates: every way that the planner compared.
        account_ms: time that the request took beyond target-only's for the same tokens, while it was alone on its
            target; negative: it gained time.
        account_bound_ms: bound of the account; above it the request uses no draft until it has recovered.
        group: what the requests of its target do together; None: they never shared it, or an older coordinator.
    """

    target_alone_ms: tuple[float, ...] = ()
    target_beside_ms: tuple[float, ...] = ()
    draft_ms: float = 0.0
    target_trip_ms: float = 0.0
    draft_trip_ms: float = 0.0
    target_sessions: int = 0
    positions: int = 0
    acceptance: tuple[float, ...] = ()
    ngram_acceptance: tuple[float, ...] = ()
    candidates: tuple[CandidateExplanation, ...] = ()
    account_ms: float = 0.0
    account_bound_ms: float = 0.0
    group: GroupReport | None = None

    def __post_init__(self) -> None:
        rows = len(EXPLAINED_ROWS)
        for name in ("target_alone_ms", "target_beside_ms"):
            times = len(getattr(self, name))
            require(times in (0, rows), name, times, f"0 or {rows} times, of {EXPLAINED_ROWS} rows")
        for name in ("acceptance", "ngram_acceptance"):
            depths = len(getattr(self, name))
            require(depths <= MAX_EXPLAINED_DEPTH, name, depths, f"at most {MAX_EXPLAINED_DEPTH} depths")
        candidates = len(self.candidates)
        require(candidates <= MAX_CANDIDATES, "candidates", candidates, f"at most {MAX_CANDIDATES}")
