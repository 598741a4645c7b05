"""Events in the order of a virtual clock, in milliseconds; those of one moment run as they were set."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class Agenda:
    """What will happen, and the present."""

    __slots__ = ("_events", "_made", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._made = 0

    def at(self, time_ms: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Have `call(argument)` run at a time that has not passed."""
        self._made += 1
        heapq.heappush(self._events, (time_ms, self._made, call, argument))

    def run(self, until_ms: float = math.inf) -> None:
        """Until nothing is left to happen, or the time is over."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until_ms:
            self.now, _, call, argument = pop(events)
            call(argument)
