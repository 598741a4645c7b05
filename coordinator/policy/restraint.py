"""What bounds the cost of wrong estimates: a guard that stops drafting, and probes that try it again. Pure."""

from __future__ import annotations

GUARD_ROUNDS = 16
"""Drafted rounds that are compared with target-only ones together."""
GUARD_LOSS = 1.5
"""Target-only tokens that drafted rounds may cost before drafting stops sooner; one round counts at most one."""
GUARD_PAUSE = (16, 1024)
"""Rounds without drafts after drafted ones were slower: the first time, and at most."""
GUARD_GROWTH = 4
"""Each pause is this many times as long as the last."""
PROBE_SHARE = 0.015
"""Most of a request's time that probes may cost."""
PROBE_ROUNDS = (16, 512)
"""Rounds without a model's draft before it is tried again: the first time, and at most; they double in between."""


class Guard:
    """Stops drafting that turned out slower than target-only rounds, for longer each time."""

    def __init__(self) -> None:
        self._pause = 0
        self._next_pause = GUARD_PAUSE[0]
        self._rounds = 0
        self._lost = 0.0

    @property
    def left(self) -> int:
        """Rounds after this one that must also go without a draft."""
        return self._pause

    def holds(self) -> bool:
        """Whether the next round must go without a draft. Ask once for each round."""
        if not self._pause:
            return False
        self._pause -= 1
        return True

    def add(self, committed: int, ms: float, plain_ms: float) -> None:
        """Count a drafted round; `plain_ms` is what a target-only round takes, 0 while that is unknown."""
        if not plain_ms:
            return
        self._rounds += 1
        self._lost += min(1.0, ms / plain_ms - committed)
        if self._rounds < GUARD_ROUNDS and self._lost < GUARD_LOSS:
            return
        if self._lost > 0:
            self._pause = self._next_pause
            self._next_pause = min(GUARD_GROWTH * self._next_pause, GUARD_PAUSE[1])
        else:
            self._next_pause = GUARD_PAUSE[0]
        self._rounds, self._lost = 0, 0.0


class Probe:
    """Says when a drafter that isn't used may be tried again, within a share of the request's time."""

    def __init__(self) -> None:
        self._rounds_left = PROBE_ROUNDS[0]
        self._next_rounds = 2 * PROBE_ROUNDS[0]
        self._elapsed_ms = 0.0
        self._spent_ms = 0.0

    def add(self, ms: float, *, drafted: bool) -> None:
        """Count a round; one with a model's draft that was no probe starts the wait anew."""
        self._elapsed_ms += ms
        if drafted:
            self._rounds_left, self._next_rounds = PROBE_ROUNDS[0], 2 * PROBE_ROUNDS[0]
        elif self._rounds_left:
            self._rounds_left -= 1

    def rounds_until(self, cost_ms: float) -> int | None:
        """Rounds before a probe at this cost may be made, 0: it may be made now; None: it can't be said."""
        if self._spent_ms + cost_ms > PROBE_SHARE * self._elapsed_ms:
            return None
        return self._rounds_left

    def tried(self) -> None:
        """Count a probe; `cost` says afterwards what it cost."""
        self._rounds_left = self._next_rounds
        self._next_rounds = min(2 * self._next_rounds, PROBE_ROUNDS[1])

    def cost(self, lost_ms: float) -> None:
        """Count what the last probe took beyond target-only rounds for its tokens; a text's first draft is slow."""
        self._spent_ms += lost_ms
