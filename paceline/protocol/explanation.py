"""Why a request was drafted for in one way and not another: the planner's knowledge, and its value of each way."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.errors import require

EXPLAINED_ROWS = (1, 2, 4, 8)
"""Rows of a target step whose time an explanation states."""
MAX_CANDIDATES = 64
MAX_EXPLAINED_DEPTH = 64


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
        account_bound_ms: bound of the account; above it the request is target-only until it has recovered.
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
