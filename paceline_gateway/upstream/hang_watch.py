"""A coordinator that takes calls and answers none: what asking it may cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.protocol.errors import DeadlineExceeded, PeerUnavailable

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
"""How late a coordinator is noticed at most that answers again; chosen, not tuned."""


class HangWatch:
    """Has a hanging peer asked by one at a time, with pauses that double; everybody else is told at once."""

    def __init__(self) -> None:
        self._asking = 0
        self._pause_s = 0.0
        """Behind the last question without an answer; 0: it doesn't hang."""
        self._again_at = self._hung_at = 0.0
        self._heard_at = 0.0

    def heard(self) -> None:
        """The peer has said something: it is slow, perhaps, and doesn't hang."""
        self._heard_at = time.monotonic()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Within it the peer is asked; `DeadlineExceeded` says that it hangs, anything else that it doesn't.

        Raises:
            PeerUnavailable: it hangs, and is asked already or not yet again.
        """
        began = time.monotonic()
        if self._pause_s and (self._asking or began < self._again_at):
            later = max(0.0, self._again_at - began)
            raise PeerUnavailable(f"it takes calls and does not answer; it is asked again in {later:.1f} s")
        self._asking += 1
        try:
            yield
            self._pause_s = 0.0
        except DeadlineExceeded:
            if self._heard_at < began:
                self._hangs(began)
            raise
        except Exception:
            self._pause_s = 0.0
            raise
        finally:
            self._asking -= 1

    def _hangs(self, began: float) -> None:
        """Questions that were asked together are one."""
        if began >= self._hung_at:
            self._hung_at = time.monotonic()
            self._pause_s = min(MOST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
            self._again_at = self._hung_at + self._pause_s
