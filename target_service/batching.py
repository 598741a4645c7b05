"""Which sessions a step should wait for: those whose verdict has left and whose next round is about to come.

A round trip lies between a verdict and the round after it. A step that begins in
that gap runs without the session, which then waits for the whole step; from then
on the sessions alternate in two halves, and each gets half the steps. So a step
may be held for sessions that will be back soon: each of them gains about a step,
and all that are ready lose the time for which it is held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

UNKNOWN_RETURN = 0.1
"""How long a session is taken to be away if it never was before, in steps."""
LATE = 1.5
"""A session that takes this many times as long as usual is late: no step is held for it."""
LATE_STEPS = 0.1
"""A session is not late before this share of a step: one that just missed a chunk would wait for all of it."""
LEARNING_RATE = 0.25
"""Weight of the latest return in how long a session is usually away."""
MEASURABLE_ROWS = 16
"""Prefix rows from which the length of a step tells what one costs."""


@dataclass(frozen=True)
class BatchingWindow:
    """Which sessions a step waits for, and until when at most."""

    awaited: frozenset[int] = frozenset()
    until: float = 0.0


@dataclass
class Batcher:
    """Knows which sessions are away and how long each usually is, and for which of them a step should wait.

    Times are seconds on the monotonic clock.
    """

    _usual_s: dict[int, float] = field(default_factory=dict)
    _left_at: dict[int, float] = field(default_factory=dict)
    _step_s: float = 0.0
    _prefix_row_s: float = 0.0

    def stepped(self, step_s: float, prefix_rows: int) -> None:
        """A step took `step_s` seconds and computed `prefix_rows` rows of prefixes."""
        self._step_s = step_s
        if prefix_rows >= MEASURABLE_ROWS:
            self._prefix_row_s = step_s / prefix_rows

    def answered(self, session: int, now: float) -> None:
        """A session's verdict leaves."""
        self._left_at[session] = now

    def back(self, session: int, now: float) -> None:
        """A session's next round is here."""
        left = self._left_at.pop(session, None)
        if left is not None:
            usual = self._usual_s.get(session, now - left)
            self._usual_s[session] = usual + LEARNING_RATE * (now - left - usual)

    def gone(self, session: int) -> None:
        """A session has ended."""
        self._left_at.pop(session, None)
        self._usual_s.pop(session, None)

    def is_away(self, sessions: frozenset[int]) -> bool:
        """Whether one of these is still to come back."""
        return not sessions.isdisjoint(self._left_at)

    def window(self, ready: int, now: float, prefix_rows: int = 0) -> BatchingWindow:
        """Hold the next step for as many sessions as pays: each gains a step's length, all before it lose time.

        The step is taken to be as long as the last, or as long as its prefix rows make it: a prompt that has just
        come makes it many times longer.

        Args:
            ready: sessions that the step would serve now, with a round or a chunk of their prefix.
            now: the present.
            prefix_rows: rows of prefixes that the step would compute.
        """
        step_s = max(self._step_s, prefix_rows * self._prefix_row_s)
        order = sorted((max(now, left + self._usual(session)), session) for session, left in self._left_at.items())
        gain = best = 0.0
        last, awaited, held = now, 0, now
        for place, (due, session) in enumerate(order, start=1):
            if now > self._left_at[session] + self._usual(session) + self._patience(session, step_s):
                continue
            gain += step_s - (due - now) - (ready + place - 1) * (due - last)
            last = due
            if gain > best:
                best, awaited, held = gain, place, due
        chosen = frozenset(session for _, session in order[:awaited])
        patience_s = max((self._patience(session, step_s) for session in chosen), default=0.0)
        return BatchingWindow(chosen, held + patience_s)

    def _patience(self, session: int, step_s: float) -> float:
        return max(self._usual(session) * (LATE - 1), step_s * LATE_STEPS)

    def _usual(self, session: int) -> float:
        return self._usual_s.get(session, UNKNOWN_RETURN * self._step_s)
