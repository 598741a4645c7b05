"""A bound on what it costs to query a coordinator that takes calls and answers none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.protocol.errors import DeadlineExceeded, PeerUnavailable

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""How late a coordinator is noticed at most that answers again; chosen, not tuned."""


class HangWatch:
    """Lets one query at a time reach a hanging peer, with pauses that double; every other query fails at once."""

    def __init__(self) -> None:
        self._query_count = 0
        self._pause_s = 0.0
        """Pause behind the last query without an answer; 0: the peer doesn't hang."""
        self._next_query_at = self._last_hang_at = 0.0
        self._last_answer_at = 0.0

    def note_answer(self) -> None:
        """Note that the peer has said something: it may be slow, but doesn't hang."""
        self._last_answer_at = time.monotonic()

    @contextmanager
    def query(self) -> Iterator[None]:
        """Query the peer within this context: `DeadlineExceeded` means that it hangs, any other end that it doesn't.

        Raises:
            PeerUnavailable: it hangs, and another query is under way or the pause isn't over.
        """
        start = time.monotonic()
        if self._pause_s and (self._query_count or start < self._next_query_at):
            wait_s = max(0.0, self._next_query_at - start)
            raise PeerUnavailable(f"it takes calls and does not answer; it is asked again in {wait_s:.1f} s")
        self._query_count += 1
        try:
            yield
            self._pause_s = 0.0
        except DeadlineExceeded:
            if self._last_answer_at < start:
                self._note_hang(start)
            raise
        except Exception:
            self._pause_s = 0.0
            raise
        finally:
            self._query_count -= 1

    def _note_hang(self, start: float) -> None:
        """Begin the next pause; queries that ran together count as one."""
        if start >= self._last_hang_at:
            self._last_hang_at = time.monotonic()
            self._pause_s = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
            self._next_query_at = self._last_hang_at + self._pause_s
