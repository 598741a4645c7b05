"""What servers gain over resting by drafting, as measured: tokens that steps commit in a time, under each load. Pure.

Resting would commit one token a step. A mode that loses too much against that pauses, each time twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from paceline.costs.running_mean import MEMORY, OUTLIER, RunningMean
from paceline.costs.service_costs import LEAST_MOVE

ALLOWED_STEPS = 2.0
"""Steps of rest that a mode, or a request that is alone, may lose in any case: a trial costs a round or two."""
FIRST_PAUSE = 128 * ALLOWED_STEPS
"""Steps of the first pause after a loss, of which the trial was 1/128; each further one is twice as long."""
SHORT_PAUSE = ALLOWED_STEPS / LEAST_MOVE
"""Steps of the pause after a mode that had gained as much as it then lost: a bad stretch may be over."""
LOOK_STEPS = round(LEAST_MOVE * FIRST_PAUSE)
"""Steps of rest by which matches are judged, and of matches by which drafts are: before they begin, and again when
what was measured is older than `FIRST_PAUSE`, since the machine's speed and the texts change."""
MOST_PAUSE = 64 * FIRST_PAUSE
"""Longest pause: trials cost next to nothing then, and what has become good is still found within minutes."""
MARGIN = 1.05
"""Gain over resting that a mode must reach, since what it takes of shared cores is not all in its rounds; and over
matches that drafts must promise before they are tried: closed forms flatter drafting by 5 to 10 %."""

StepMs = Callable[[float], float]  # milliseconds of a step by its rows


class Mode(IntEnum):
    """What the requests of a group may do."""

    REST = 0
    """Nothing is proposed: no match is searched for, and no draft works."""
    MATCHES = 1
    """Matches are proposed; no draft works."""
    DRAFTS = 2
    """Drafts work, too."""


@dataclass
class ModeAccount:
    """The account of one mode under one load.

    Attributes:
        tokens, steps: of the latest rounds, what they committed, and what resting would have in the same time.
        loss: what the mode lost since it was opened, in steps of rest; below 0 it is a gain.
        pause: length of the next pause, steps.
        opens_at: end of the present pause.
        last_at, last_gain: when it ran last, and its gain then; it outlives what is forgotten.
    """

    tokens: float = 0.0
    steps: float = 0.0
    loss: float = 0.0
    pause: float = FIRST_PAUSE
    opens_at: float = 0.0
    last_at: float = 0.0
    last_gain: float | None = None

    @property
    def gain(self) -> float:
        """What the latest rounds committed beside resting; 1 before any is known."""
        return self.tokens / self.steps if self.steps else 1.0

    def add(self, tokens: float, steps: float, best_other: float, now: float) -> None:
        """Count a share of the group's tokens and steps. `best_other`: the gain of the mode that it stands in for."""
        share, self.last_at = max(0.0, 1 - steps / MEMORY), now
        self.tokens, self.steps = share * self.tokens + tokens, share * self.steps + steps
        self.last_gain = self.gain
        self.loss = max(self.loss + steps * best_other - tokens, -ALLOWED_STEPS)
        if self.loss <= -ALLOWED_STEPS:
            self.pause = SHORT_PAUSE
        elif self.loss > ALLOWED_STEPS and self.gain < best_other:
            self.opens_at, self.pause = now + self.pause, min(2 * self.pause, MOST_PAUSE)
            self.forget()

    def forget(self) -> None:
        """Forget what was measured."""
        self.tokens = self.steps = self.loss = 0.0


@dataclass
class Goodput:
    """The accounts of all modes under all loads; a load is the power of two nearest to the number of sessions.

    Attributes:
        steps: steps of rest that fit into the time so far; the clock of pauses.
        has_line: whether a line tells how steps differ by their rows. Then a load that was not measured is taken to
            be as the nearest one, and the first of all needs no look at rest.
        accounts: by load and mode.
    """

    steps: float = 0.0
    has_line: bool = True
    accounts: dict[tuple[int, Mode], ModeAccount] = field(default_factory=dict)
    _rest_ms: dict[int, RunningMean] = field(default_factory=dict)

    def steps_to_see(self, sessions: int, mode: Mode) -> int:
        """Steps that a look at a mode still takes."""
        return max(0, math.ceil(LOOK_STEPS - self.account(sessions, mode).steps))

    def is_open(self, sessions: int, mode: Mode) -> bool:
        """Whether a mode may run: it has lost nothing, or its pause is over."""
        return self.account(sessions, mode).opens_at <= self.steps

    def account(self, sessions: int, mode: Mode) -> ModeAccount:
        """The account of a mode under a load; what wasn't measured lately is taken to be as under the nearest."""
        load = load_of(sessions)
        account = self.accounts.get((load, mode))
        if account is None:
            fresh = ModeAccount(steps=LOOK_STEPS if mode is Mode.REST and self.has_line else 0.0)
            account = self.accounts[load, mode] = replace(self._nearest(load, mode) or fresh, loss=0.0)
        if self._is_old(account):
            account.forget()
            if (other := self._nearest(load, mode)) is not None and not self._is_old(other):
                account.tokens, account.steps, account.last_at = other.tokens, other.steps, other.last_at
        return account

    def _nearest(self, load: int, mode: Mode) -> ModeAccount | None:
        if not self.has_line:
            return None
        others = [(abs(at - load), one) for (at, its), one in self.accounts.items() if its is mode and at != load]
        return min(others, key=lambda each: (self._is_old(each[1]), each[0]), default=(0, None))[1]

    def _is_old(self, account: ModeAccount) -> bool:
        return self.steps > account.last_at + FIRST_PAUSE

    def take_rest(self, sessions: int, ms: float) -> None:
        """Count a step at rest."""
        rest = self._rest_ms.setdefault(sessions, RunningMean(ms, 0.0, MEMORY))
        rest.add(min(ms, OUTLIER * rest.value))

    def rest_ms(self, sessions: int, step_ms: StepMs) -> float:
        """Time of a step at rest with a row a session, as measured with as many, or else with nearly as many.

        Rows of others' proposals count as sessions; `step_ms`: of a step by its rows, by the target's line.
        """
        if not self._rest_ms:
            return step_ms(sessions)
        nearest = min(self._rest_ms, key=lambda other: abs(other - sessions))
        return self._rest_ms[nearest].value * step_ms(sessions) / step_ms(nearest)


def load_of(sessions: float) -> int:
    """The load of so many sessions."""
    return round(math.log2(sessions))
