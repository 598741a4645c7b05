"""What the requests that share a target gain or lose together by drafting, and so what they may do now. Pure.

The account of one request can't see what it costs others, so all are judged together (`paceline.costs.goodput`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.costs.goodput import ALLOWED_STEPS, LOOK_STEPS, MARGIN, Goodput, Mode, StepMs, load_of
from paceline.costs.running_mean import OUTLIER, SPEED_MEMORY
from paceline.costs.service_costs import LEAST_MOVE
from paceline.protocol.records import RoundRecord


@dataclass
class LossBudget:
    """The loss of a request in steps of rest, of which its rounds took `steps`; below 0 it is a gain.

    A gain counts up to the bound: more would only pay for a drafter that has become useless. `regret`: the gain of
    matches that were left out since all that may be lost was; they alone may lose it.
    """

    loss: float = 0.0
    steps: float = 0.0
    regret: float = 0.0

    @property
    def bound(self) -> float:
        """The largest allowed loss: the share of its time that users are promised."""
        return max(ALLOWED_STEPS, LEAST_MOVE * self.steps)

    def is_spent(self, gain: float = 0.0) -> bool:
        """Whether all that may be lost is lost, though so much will be won back."""
        return self.loss > self.bound + gain

    def add(self, tokens: float, steps: float) -> None:
        """Count a round."""
        self.steps += steps
        self.loss = max(self.loss + steps - tokens, -self.bound)
        self.regret *= self.is_spent()

    def leave_out(self, gain: float) -> None:
        """Count what a match would have gained: bad luck at first must not end a copy (a CUSUM; Page 1954)."""
        self.regret = max(0.0, self.regret + gain)


@dataclass
class Group(Goodput):
    """The requests of one coordinator that share a target.

    Attributes:
        calm_at: until when drafts don't begin, since the load has just changed: they would compute whole texts beside
            everybody's steps, and the first of a burst is alone for moments, the last for some steps.
        promise, promise_alone: gain over matches that drafts promise, to all together and to one alone; 0: not known.
        promise_due: when that to all is to be worked out anew.
        last_loss: of the request before, at most 0: the next begins with it, since a good draft fails at times, too.
    """

    calm_at: float = 0.0
    promise: float = 0.0
    promise_alone: float = 0.0
    promise_due: float = 0.0
    last_loss: float = 0.0
    _rests: int = 0
    _latest: tuple[tuple[int, float, float], Mode] = (1, 0.0, 0.0), Mode.DRAFTS

    def mode(self, sessions: int) -> Mode:
        """What the requests may do now; one that has been alone for a while has an account of its own."""
        if self._latest[0] != (key := (sessions, self.steps, self.promise)):
            if load_of(sessions) != load_of(self._latest[0][0]):
                calm_steps = LOOK_STEPS if sessions < self._latest[0][0] else 1
                self.calm_at, self.promise_due = self.steps + calm_steps, self.steps
            self._latest = key, self._mode(sessions)
        return self._latest[1]

    def _mode(self, sessions: int) -> Mode:
        if sessions > 1 and self.steps_to_see(sessions, Mode.REST):
            return Mode.REST
        if self.steps_to_drafts(sessions) == 0:
            return Mode.DRAFTS
        return Mode.MATCHES if self.is_open(sessions, Mode.MATCHES) else Mode.REST

    def steps_to_drafts(self, sessions: int) -> int | None:
        """Steps after which drafts may begin or go on; 0: they may now. None: they are not worth it."""
        looks: list[Mode] = []
        if sessions > 1:
            pays = self.promise > MARGIN or self.tries_drafts(sessions)
            if not pays or not self.is_open(sessions, Mode.DRAFTS):
                return None
            looks = [Mode.REST, *([Mode.MATCHES] if self.is_open(sessions, Mode.MATCHES) else [])]
        calm_steps = 0 if self._latest[1] is Mode.DRAFTS else math.ceil(self.calm_at - self.steps)
        return max(0, calm_steps, sum(self.steps_to_see(sessions, mode) for mode in looks))

    def tries_drafts(self, sessions: int) -> bool:
        """Whether drafts are looked at again, whatever they promise: nobody has learned of them since they ran."""
        if sessions == 1 or self.promise > MARGIN:
            return False
        drafts = self.account(sessions, Mode.DRAFTS)
        return drafts.last_at > 0 and drafts.steps < SPEED_MEMORY

    def learn(self, record: RoundRecord, sessions: int, own: int, step_ms: StepMs, *, reads: bool = False) -> float:
        """Learn from a round of a request that follows the group, during which the sessions stayed the same.

        Of the sessions `own` are this coordinator's. The others are taken to commit a token a step: what the group's
        rows take from them is its loss, but their proposals' rows are there anyway. At rest one round stands for
        `own`, to save CPU. `reads`: its draft had yet to read the text, so it owes no gain, but may not cost much.
        Returns the steps of rest that fit into its time; 0: it isn't counted.
        """
        mode, step = self.mode(sessions), record.target
        self._rests += mode is Mode.REST
        if mode is Mode.REST and self._rests % own:
            return 0.0
        is_plain = record.self_started and not record.proposed and step.rows == step.sessions == sessions
        if is_plain and mode is Mode.REST:
            self.take_rest(sessions, record.round_ms)
        base_rows = sessions if own == sessions else max(sessions, step.rows - own * record.proposed)
        if (rest_ms := self.rest_ms(base_rows, step_ms)) <= 0:
            return 0.0
        most_ms = OUTLIER * max(rest_ms, step_ms(step.rows)) + record.draft_wait_ms
        round_steps = min(record.round_ms, most_ms) / rest_ms
        steps = round_steps / (own if mode is not Mode.REST else 1)
        self.steps += steps
        if sessions == 1 or step.prefix_rows:  # a prompt is not the mode's price
            return round_steps
        others = (1 - own / sessions) * steps * step_ms(base_rows) / step_ms(max(step.rows, base_rows))
        committed = (record.accepted + 1) / sessions + others
        margin = 1 + (MARGIN - 1) * own / sessions  # what drafting gains is of its own requests alone
        tokens, least = (committed, margin) if mode is not Mode.REST else (steps, 1.0)
        best_other = max(least, self.account(sessions, Mode.MATCHES).gain) if mode is Mode.DRAFTS else least
        self.account(sessions, mode).add(tokens, steps, 1.0 if reads else best_other, self.steps)
        return round_steps
