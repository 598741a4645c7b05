"""Whether the engine gets on with what waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class EngineProgress:
    """Notes when the engine's thread begins and ends its work; on the monotonic clock, seconds.

    Args:
        timeout_s: work that takes longer hangs, and so does work that nobody begins for as long.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._engaged = False
        self._moved = time.monotonic()

    @contextmanager
    def engaged(self) -> Iterator[None]:
        """The thread works meanwhile."""
        self._engaged, self._moved = True, time.monotonic()
        try:
            yield
        finally:
            self._engaged, self._moved = False, time.monotonic()

    def began(self) -> None:
        """The thread goes on with other work."""
        self._moved = time.monotonic()

    def moves(self, *, waits: bool) -> bool:
        """Whether there is nothing to do, or something has begun or ended of late; to be asked more often than that.

        Args:
            waits: whether there is something that could be in a step.
        """
        now = time.monotonic()
        if not (self._engaged or waits):
            self._moved = now
        return now - self._moved < self._timeout_s
