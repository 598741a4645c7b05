"""A watch over the engine's thread: whether it makes progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.runtime import clock


class EngineProgress:
    """Notes when the engine's thread begins and ends its work, in seconds on the monotonic clock.

    Args:
        timeout_s: the engine hangs if a piece of work takes longer, or waits longer to begin.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_busy = False
        self._moved_at = clock.now()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The thread works during the block."""
        self._is_busy, self._moved_at = True, clock.now()
        try:
            yield
        finally:
            self._is_busy, self._moved_at = False, clock.now()

    def note_work(self) -> None:
        """Note that the thread begins another piece of work."""
        self._moved_at = clock.now()

    def moves(self, *, waits: bool) -> bool:
        """Whether there is nothing to do, or work has begun or ended within the timeout.

        It must be called more often than the timeout.

        Args:
            waits: whether any work waits for a step.
        """
        now = clock.now()
        if not (self._is_busy or waits):
            self._moved_at = now
        return now - self._moved_at < self._timeout_s
