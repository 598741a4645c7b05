"""The closed form of a cycle: what a session commits from one round to the next, and how long that takes. Pure.

The planner and `paceline plan` add up rounds by these functions alone: the one with what it learns, the other with
what was replayed. A round that is drafted just in time waits for the draft and the trips, others for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from paceline.costs.acceptance import FAN_OUT

AHEAD_ROWS = float(FAN_OUT)
"""Rows of a session in a step that drafts for outcomes: the likeliest ones of a round with the usual fan-out."""


class Cycle(NamedTuple):
    """From one round to the next: tokens committed, and milliseconds."""

    tokens: float
    ms: float

    @property
    def rate(self) -> float:
        """Tokens a millisecond; 0 before any time is known."""
        return self.tokens / self.ms if self.ms > 0 else 0.0


def proposal_ms(step_ms: Callable[[float], float], levels: Sequence[float], sessions: float = 1.0) -> list[float]:
    """Milliseconds of a draft's steps for a proposal, by its depth, when so many sessions draft at once.

    `step_ms`: of a draft's step by its rows. `levels`: nodes at each depth but the last. The first step has a row for
    the last committed token and one for the last proposed, which was not computed; each further step has the nodes of
    the depth before.
    """
    times = {nodes: step_ms(nodes * sessions) for nodes in {2, *levels}}
    return list(accumulate(times[nodes] for nodes in (2, *levels)))


def ahead_cycle(hits: float, hit: Cycle, misses: Sequence[Cycle]) -> Cycle:
    """The cycle of rounds whose outcomes are drafted for: a share of hits, and else the miss of the greatest rate."""
    miss = max(misses, key=attrgetter("rate"))
    return Cycle(*(hits * of_hit + (1 - hits) * of_miss for of_hit, of_miss in zip(hit, miss, strict=True)))


def tokens_ahead(room_ms: float, level_ms: float, depth: int) -> int:
    """Tokens of an outcome's proposal that are drafted within a time, at most `depth`.

    A guess at the token after a proposal needs the row of its last token, so n tokens ahead take n + 1 steps.
    """
    return min(depth, max(0, int(room_ms / level_ms) - 1)) if level_ms > 0 else depth


def head_start_ms(ahead_ms: float, level_ms: float) -> float:
    """By how much sooner the proposal for an outcome comes that is being drafted, though none was there in time."""
    return ahead_ms - level_ms if level_ms < ahead_ms < 2 * level_ms else 0.0
