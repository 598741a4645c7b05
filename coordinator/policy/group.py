"""What the requests that share a target gain or lose together by drafting, and so what they may do now. Pure.

A request that is alone is judged by what it loses itself. An account of its own can't see what it costs others: its
rows lengthen their steps, its draft takes their cores, and none of that is in a cost line. So requests that share a
target are judged together, by what they measure. In a mode the group commits tokens in some time; at rest it would
have committed one token a step in the same time. A mode that loses too much against that is left for a pause, which
doubles each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from paceline.costs.running_mean import MEMORY, OUTLIER, SPEED_MEMORY, RunningMean
from paceline.costs.service_costs import LEAST_MOVE
from paceline.protocol.records import RoundRecord

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


@dataclass
class LossBudget:
    """The loss of a request in steps of rest, of which its rounds took `steps`; below 0 it is a gain.

    A gain counts up to the bound only: more of it would only pay for a drafter that has become useless.
    """

    loss: float = 0.0
    steps: float = 0.0

    @property
    def bound(self) -> float:
        """The largest allowed loss: the share of its time that users are promised."""
        return max(ALLOWED_STEPS, LEAST_MOVE * self.steps)

    @property
    def is_spent(self) -> bool:
        """Whether all that may be lost is lost."""
        return self.loss > self.bound

    def add(self, tokens: float, steps: float) -> None:
        """Count a round."""
        self.steps += steps
        self.loss = max(self.loss + steps - tokens, -self.bound)


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
        kept, self.last_at = max(0.0, 1 - steps / MEMORY), now
        self.tokens, self.steps = kept * self.tokens + tokens, kept * self.steps + steps
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
class Group:
    """The requests of one coordinator that share a target.

    Attributes:
        steps: steps of rest that fit into the time since the group began; the clock of pauses.
        calm_at: until when a load that has just changed may draft no more than the one before: a burst begins and
            ends with one request, for which a draft would compute a whole text beside everybody's steps.
        promise: the gain over matches that drafts promise by the planner's closed form; 0: not known.
        accounts: of each mode under each load, which is the power of two nearest to the number of sessions.
    """

    steps: float = 0.0
    calm_at: float = 0.0
    promise: float = 0.0
    accounts: dict[tuple[int, Mode], ModeAccount] = field(default_factory=dict)
    _rest_ms: dict[int, RunningMean] = field(default_factory=dict)
    _latest: tuple[tuple[int, float, float], Mode] = (1, 0.0, 0.0), Mode.DRAFTS

    def mode(self, sessions: int) -> Mode:
        """What the requests may do now; one that has been alone for a while has an account of its own."""
        if self._latest[0] != (key := (sessions, self.steps, self.promise)):
            (earlier, *_), mode = self._latest
            if _load(sessions) != _load(earlier):
                self.calm_at = self.steps + LOOK_STEPS
            best = self._mode(sessions)
            self._latest = key, best if self.steps >= self.calm_at else min(best, mode)
        return self._latest[1]

    def _mode(self, sessions: int) -> Mode:
        if sessions > 1 and self.steps_to_see(sessions, Mode.REST):
            return Mode.REST
        if self._steps_to_drafts(sessions) == 0:
            return Mode.DRAFTS
        return Mode.MATCHES if self.is_open(sessions, Mode.MATCHES) else Mode.REST

    def steps_to_drafts(self, sessions: int) -> int | None:
        """Steps after which drafts may begin or go on; 0: they may now. None: they are not worth it."""
        steps = self._steps_to_drafts(sessions)
        is_held = self.mode(sessions) is not Mode.DRAFTS
        return steps if steps is None or not is_held else max(steps, math.ceil(self.calm_at - self.steps))

    def _steps_to_drafts(self, sessions: int) -> int | None:
        if sessions <= 1:
            return 0
        pays = self.promise > MARGIN or self.tries_drafts(sessions)
        if not pays or not self.is_open(sessions, Mode.DRAFTS):
            return None
        looks = [Mode.REST, *([Mode.MATCHES] if self.is_open(sessions, Mode.MATCHES) else [])]
        return sum(self.steps_to_see(sessions, mode) for mode in looks)

    def tries_drafts(self, sessions: int) -> bool:
        """Whether drafts are looked at again, whatever they promise: nobody has learned of them since they ran."""
        drafts = self.account(sessions, Mode.DRAFTS) if sessions > 1 else ModeAccount()
        return self.promise <= MARGIN and drafts.last_at > 0 and drafts.steps < SPEED_MEMORY

    def steps_to_see(self, sessions: int, mode: Mode) -> int:
        """Steps that a look at a mode still takes."""
        return max(0, math.ceil(LOOK_STEPS - self.account(sessions, mode).steps))

    def is_open(self, sessions: int, mode: Mode) -> bool:
        """Whether a mode may run: it has lost nothing, or its pause is over."""
        return self.account(sessions, mode).opens_at <= self.steps

    def account(self, sessions: int, mode: Mode) -> ModeAccount:
        """The account of a mode under a load; what wasn't measured lately is taken to be as under the nearest."""
        load = _load(sessions)
        account = self.accounts.get((load, mode))
        if account is None:
            # Before the first look at rest, the target's own line tells its time.
            fresh = ModeAccount(steps=LOOK_STEPS if mode is Mode.REST else 0.0)
            account = self.accounts[load, mode] = replace(self._nearest(load, mode) or fresh, loss=0.0)
        if self._is_old(account):
            account.forget()
            if (other := self._nearest(load, mode)) is not None and not self._is_old(other):
                account.tokens, account.steps, account.last_at = other.tokens, other.steps, other.last_at
        return account

    def _nearest(self, load: int, mode: Mode) -> ModeAccount | None:
        others = [
            (abs(other - load), one) for (other, its), one in self.accounts.items() if its is mode and other != load
        ]
        return min(others, key=lambda each: (self._is_old(each[1]), each[0]), default=(0, None))[1]

    def _is_old(self, account: ModeAccount) -> bool:
        return self.steps > account.last_at + FIRST_PAUSE

    def rest_ms(self, sessions: int, step_ms: Callable[[float], float]) -> float:
        """Time of a step at rest, as measured with as many sessions, or else with nearly as many.

        Args:
            sessions: in the step, each with one row.
            step_ms: by the target's line: of a step by its rows.
        """
        if not self._rest_ms:
            return step_ms(sessions)
        nearest = min(self._rest_ms, key=lambda other: abs(other - sessions))
        return self._rest_ms[nearest].value * step_ms(sessions) / step_ms(nearest)

    def learn(self, record: RoundRecord, sessions: int, own: int, step_ms: Callable[[float], float]) -> float:
        """Learn from a round of a request that follows the group, during which the sessions stayed the same.

        Of the sessions `own` are this coordinator's. The others are taken to commit a token a step, so what the
        group's rows take from them counts as its loss. Returns the steps of rest that fit into its time.
        """
        mode, step = self.mode(sessions), record.target
        is_plain = record.self_started and not record.proposed and step.rows == step.sessions == sessions
        if is_plain and mode is Mode.REST:
            rest = self._rest_ms.setdefault(sessions, RunningMean(record.round_ms, 0.0, MEMORY * sessions))
            rest.add(min(record.round_ms, OUTLIER * rest.value))
        if (rest_ms := self.rest_ms(sessions, step_ms)) <= 0:
            return 0.0
        round_steps = min(record.round_ms, OUTLIER * rest_ms + record.draft_wait_ms) / rest_ms
        steps = round_steps / own
        self.steps += steps
        if sessions == 1 or step.prefix_rows:  # a prompt is not the mode's price
            return round_steps
        others = (1 - own / sessions) * steps * step_ms(sessions) / step_ms(max(step.rows, sessions))
        committed = (record.accepted + 1) / sessions + others
        margin = 1 + (MARGIN - 1) * own / sessions  # what drafting gains is of its own requests alone
        tokens, least = (committed, margin) if mode is not Mode.REST else (steps, 1.0)
        best_other = max(least, self.account(sessions, Mode.MATCHES).gain) if mode is Mode.DRAFTS else least
        self.account(sessions, mode).add(tokens, steps, best_other, self.steps)
        return round_steps


def _load(sessions: int) -> int:
    return round(math.log2(sessions))
