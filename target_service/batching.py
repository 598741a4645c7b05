"""Which sessions a step should wait for: those whose verdict has left and whose next round is about to come.

A round trip lies between a verdict and the round after it. A step that begins in
that gap runs without the session, which then waits for the whole step; from then
on the sessions alternate in two halves, and each gets half the steps. So a step
may wait for sessions that will be back soon: each of them gains about a step, and
all that are ready lose the time of the wait.

The order of sessions of several tenants: no tenant waits for all sessions of another one.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from target_service.session import Session

MAX_REMEMBERED = 1024
"""Most tenants whose latest turn is remembered: as many as a coordinator may have keys."""


class Turns:
    """Orders waiting sessions: first those of the tenant with the fewest KV rows.

    KV rows are what sessions use of the engine, for as long as they use them. So the tenant with
    the fewest rows has had the least, whether its sessions are few and long or many and short. Of tenants
    with equal rows the one whose turn was longest ago comes first.
    """

    def __init__(self) -> None:
        self._rows = Counter[str]()
        self._latest: dict[str, int] = {}
        self._turn = itertools.count(1)

    def hold(self, session: Session) -> None:
        """Count the rows of an admitted session."""
        tenant = session.facts.tenant
        self._rows[tenant] += session.max_rows
        self._latest.pop(tenant, None)
        self._latest[tenant] = next(self._turn)
        if len(self._latest) > MAX_REMEMBERED:
            del self._latest[next(iter(self._latest))]

    def free(self, session: Session) -> None:
        """Remove the rows of an admitted session that has ended."""
        tenant = session.facts.tenant
        self._rows[tenant] -= session.max_rows
        if not self._rows[tenant]:
            del self._rows[tenant]

    def order(self, waiting: Iterable[Session], picks: Sequence[Session]) -> Iterator[Session]:
        """The waiting sessions in the order of their tenants' turns; those of one tenant keep their order.

        Args:
            waiting: oldest first.
            picks: the sessions so far that will be admitted; the caller extends it during the iteration.
        """
        queues, rows = _by_tenant(waiting), Counter(self._rows)
        count = 0
        while queues:
            tenant = min(queues, key=lambda each: (rows[each], self._latest.get(each, 0)))
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
            for session in picks[count:]:
                rows[session.facts.tenant] += session.max_rows
            count = len(picks)


def alternating(sessions: Iterable[Session]) -> list[Session]:
    """The first session of each tenant, then the second of each; those of one tenant keep their order."""
    turns = itertools.zip_longest(*_by_tenant(sessions).values())
    return [session for session in itertools.chain.from_iterable(turns) if session is not None]


def _by_tenant(sessions: Iterable[Session]) -> dict[str, deque[Session]]:
    queues: dict[str, deque[Session]] = {}
    for session in sessions:
        queues.setdefault(session.facts.tenant, deque()).append(session)
    return queues


UNKNOWN_RETURN = 0.1
"""Expected absence of a session that was never away before, in steps."""
LATE = 1.5
"""A session whose absence is this many times the usual one is late: no step waits for it."""
LATE_STEPS = 0.1
"""A session is not late before this share of a step has passed: if it just missed a chunk, it would wait for all of
it."""
LEARNING_RATE = 0.25
"""Weight of the latest absence in a session's usual absence."""
MEASURABLE_ROWS = 16
"""Fewest prefix rows with which a step's length tells the cost of one."""


@dataclass(frozen=True)
class BatchingWindow:
    """The sessions that a step waits for, and the latest end of the wait (monotonic clock)."""

    sessions: frozenset[int] = frozenset()
    end_s: float = 0.0


@dataclass
class Batcher:
    """Learns how long sessions are usually away, and says which of them a step should wait for.

    Times are seconds on the monotonic clock.
    """

    _usual_s: dict[int, float] = field(default_factory=dict)
    _left_at: dict[int, float] = field(default_factory=dict)
    _step_s: float = 0.0
    _prefix_row_s: float = 0.0

    def note_step(self, step_s: float, prefix_rows: int) -> None:
        """Note a step that took `step_s` seconds and computed `prefix_rows` rows of prefixes."""
        self._step_s = step_s
        if prefix_rows >= MEASURABLE_ROWS:
            self._prefix_row_s = step_s / prefix_rows

    def note_answer(self, session: int, now: float) -> None:
        """Note that a session's verdict leaves."""
        self._left_at[session] = now

    def note_return(self, session: int, now: float) -> None:
        """Note that a session's next round is here."""
        left_at = self._left_at.pop(session, None)
        if left_at is not None:
            usual = self._usual_s.get(session, now - left_at)
            self._usual_s[session] = usual + LEARNING_RATE * (now - left_at - usual)

    def forget(self, session: int) -> None:
        """Forget a session that has ended."""
        self._left_at.pop(session, None)
        self._usual_s.pop(session, None)

    def is_away(self, sessions: frozenset[int]) -> bool:
        """Whether any of these sessions is away."""
        return not sessions.isdisjoint(self._left_at)

    def window(self, ready: int, now: float, prefix_rows: int = 0) -> BatchingWindow:
        """Choose the sessions that the next step waits for: each gains a step's length, all before it lose time.

        The step is expected to be as long as the last, or as long as its prefix rows make it: a prompt that has just
        come makes it many times longer.

        Args:
            ready: the number of sessions that the step would serve now, with a round or a chunk of their prefix.
            now: the present time.
            prefix_rows: the number of prefix rows that the step would compute.
        """
        step_s = max(self._step_s, prefix_rows * self._prefix_row_s)
        order = sorted(
            (max(now, left_at + self._usual(session)), session) for session, left_at in self._left_at.items()
        )
        gain = best = 0.0
        last, best_count, end_s = now, 0, now
        for place, (due, session) in enumerate(order, start=1):
            if now > self._left_at[session] + self._usual(session) + self._patience(session, step_s):
                continue
            gain += step_s - (due - now) - (ready + place - 1) * (due - last)
            last = due
            if gain > best:
                best, best_count, end_s = gain, place, due
        sessions = frozenset(session for _, session in order[:best_count])
        patience_s = max((self._patience(session, step_s) for session in sessions), default=0.0)
        return BatchingWindow(sessions, end_s + patience_s)

    def _patience(self, session: int, step_s: float) -> float:
        return max(self._usual(session) * (LATE - 1), step_s * LATE_STEPS)

    def _usual(self, session: int) -> float:
        return self._usual_s.get(session, UNKNOWN_RETURN * self._step_s)
