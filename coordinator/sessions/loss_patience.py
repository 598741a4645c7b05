"""How long a round that has lost its target may wait for another one."""

from __future__ import annotations

import math

from paceline.runtime import clock

MAX_SPARED = 4
"""Most losses of one round for which the time that its target worked is not counted. With more of them, the round is
what its targets die of."""


class LossPatience:
    """One round's patience: `wait_s` from its first loss, without the time in which a target worked on its session.

    A session that waits at its second target, in a queue or for a prefix, has a target meanwhile. If that one dies,
    too, the time since the first died does not end the session.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._deadline = math.inf
        self._behind_work = 0

    @property
    def left_s(self) -> float:
        """Seconds until the round is given up; infinite before the first loss."""
        return self._deadline - clock.now()

    def note_loss(self, worked_s: float) -> None:
        """Count the loss of a target that worked on the session for `worked_s`."""
        self._behind_work += worked_s > 0
        spared_s = worked_s if self._behind_work <= MAX_SPARED else 0.0
        self._deadline = min(self._deadline + spared_s, clock.now() + self._wait_s)
