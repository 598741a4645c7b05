"""Sessions whose verdict has left and whose next round is about to come.

A round trip lies between a verdict and the round after it. A step that begins
in that gap runs without the session, which then waits for the whole of it; from
then on the sessions alternate in two halves, and each gets half the steps. So a
step may be held for those that will be back soon: each of them gains about a
step, and all that are ready lose the time that it is held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

UNKNOWN_RETURN = 0.1
"""How long a session takes that never came back, in steps."""
LATE = 1.5
"""A session that takes so many times as long as usual is late: no step is held for it."""
LATE_STEPS = 0.1
"""Nor is it late before this share of a step: who misses a chunk by a hiccup would wait for all of it."""
LEARNING_RATE = 0.25
TELLING_ROWS = 16
"""Prefix rows from which a step's length says what one costs."""


@dataclass(frozen=True)
class Window:
    """Whom a step waits for, and until when at most."""

    awaited: frozenset[int] = frozenset()
    until: float = 0.0


@dataclass
class BatchingWindow:
    """Who is away, and how long each usually is. Times are seconds on the monotonic clock."""

    _usual_s: dict[int, float] = field(default_factory=dict)
    _left_at: dict[int, float] = field(default_factory=dict)
    _step_s: float = 0.0
    _prefix_row_s: float = 0.0

    def stepped(self, step_s: float, prefix_rows: int) -> None:
        """A step took that long, with so many rows of prefixes in it."""
        self._step_s = step_s
        if prefix_rows >= TELLING_ROWS:
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

    def hold(self, ready: int, now: float, prefix_rows: int = 0) -> Window:
        """Hold the next step for as many as pay: a step's length for each, against the time lost by all before it.

        It is taken to be as long as the last, or as the prefix rows that wait for it make it: a prompt
        that has just come makes it many times longer.

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
        return Window(chosen, held + max((self._patience(session, step_s) for session in chosen), default=0.0))

    def _patience(self, session: int, step_s: float) -> float:
        return max(self._usual(session) * (LATE - 1), step_s * LATE_STEPS)

    def _usual(self, session: int) -> float:
        return self._usual_s.get(session, UNKNOWN_RETURN * self._step_s)
