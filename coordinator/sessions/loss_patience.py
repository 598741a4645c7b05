"""How long a round that has lost its target may be without one."""

from __future__ import annotations

import math
import time

MAX_SPARED = 4
"""Losses of one round behind work on it whose time is spared: more, and the round is what its targets die of."""


class LossPatience:
    """One round's patience: `wait_s` from its first loss, less what targets that took its session in were at work.

    A session that waits at another target, in a queue or for a prefix, has one for that time: it isn't lost with
    the second one because the first died long ago.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._deadline = math.inf
        self._behind_work = 0

    @property
    def left_s(self) -> float:
        """Until the round is given up; without a loss it isn't."""
        return self._deadline - time.monotonic()

    def lost(self, worked_s: float) -> None:
        """The target is lost, which was seen at work on the session for so long."""
        self._behind_work += worked_s > 0
        spared_s = worked_s if self._behind_work <= MAX_SPARED else 0.0
        self._deadline = min(self._deadline + spared_s, time.monotonic() + self._wait_s)
