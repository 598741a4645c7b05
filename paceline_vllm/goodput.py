"""Whether drafts are worth their price to a server, by the tokens that its steps commit in a time. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coordinator.policy.group import FIRST_PAUSE, LOOK_STEPS, MARGIN, ModeAccount
from paceline.costs.running_mean import MEMORY, OUTLIER, RunningMean


@dataclass
class LoadAccount:
    """What is known of steps under one load, which is the power of two nearest to their number of requests.

    Attributes:
        rest_ms: of a step without drafts, by its number of requests.
        looks: steps without drafts of the latest look at them, which ended when the clock was `seen_at`.
        drafts: the account of steps that might have drafts.
    """

    rest_ms: dict[int, RunningMean] = field(default_factory=dict)
    looks: int = 0
    seen_at: float = 0.0
    drafts: ModeAccount = field(default_factory=ModeAccount)

    def rest_of(self, rows: int) -> float:
        """Milliseconds of a step without drafts, as measured with the nearest number of requests."""
        return self.rest_ms[min(self.rest_ms, key=lambda other: abs(other - rows))].value


class GoodputJudge:
    """Compares steps with drafts to steps without, under each load, as a coordinator does for its group of requests.

    A load begins with `LOOK_STEPS` steps without drafts, and has as many again when those are old. Drafts that lose
    more than a few steps against them pause; each pause is twice as long.
    """

    def __init__(self) -> None:
        self._steps = 0.0
        """Steps without drafts that fit into the time so far; the clock of pauses."""
        self._loads: dict[int, LoadAccount] = {}

    def may_offer(self, rows: int) -> bool:
        """Whether steps of so many requests may have drafts now."""
        load = self._load(rows)
        if self._steps > load.seen_at + FIRST_PAUSE:
            load.looks = 0
        return load.looks >= LOOK_STEPS and load.drafts.opens_at <= self._steps

    def learn(self, rows: int, tokens: int, step_ms: float, *, has_drafts: bool) -> None:
        """Learn from a step of `rows` requests that committed `tokens`; `has_drafts`: whether it might have some."""
        load = self._load(rows)
        if not has_drafts:
            rest = load.rest_ms.setdefault(rows, RunningMean(step_ms, 0.0, MEMORY))
            rest.add(min(step_ms, OUTLIER * rest.value))
            self._steps += 1
            load.looks, load.seen_at = load.looks + 1, self._steps
        elif load.rest_ms and (rest_ms := load.rest_of(rows)) > 0:
            steps = min(step_ms / rest_ms, OUTLIER)
            self._steps += steps
            load.drafts.add(tokens / rows, steps, MARGIN, self._steps)

    def _load(self, rows: int) -> LoadAccount:
        return self._loads.setdefault(round(math.log2(rows)), LoadAccount())
