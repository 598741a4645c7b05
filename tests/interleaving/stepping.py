"""An event loop whose clock stands still, and jobs of an engine's thread that run from one pause to the next."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextvars import Context
from heapq import heappop, heappush
from typing import TypeVarTuple

from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.wrapped import WrappedEngine
from paceline_lab.simulate.virtual_time import JobExecutor

STEP_S = 0.005
"""What each step of an engine takes on the clock."""

Args = TypeVarTuple("Args")


class SteppedLoop(asyncio.SelectorEventLoop):
    """Runs what is ready, and has no time of its own.

    Attributes:
        now: the clock, in seconds.
        calls: callbacks that were scheduled so far, one more for each move of the clock.
    """

    def __init__(self) -> None:
        self.now = 1_000.0
        self.calls = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        super().__init__()

    def time(self) -> float:
        return self.now

    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        self.calls += 1
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        self.calls += 1
        return super().call_soon_threadsafe(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        self.calls += 1
        heappush(self._timers, (when, self.calls, handle))
        return handle

    @property
    def timers(self) -> list[str]:
        """Timers that are set and have not fired."""
        return sorted(str(handle) for when, _, handle in self._timers if when > self.now and not handle.cancelled())

    def move(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.calls += 1

    def next_timer(self) -> float:
        """When the next timer is due; infinite: none is set."""
        while self._timers and (self._timers[0][2].cancelled() or self._timers[0][0] <= self.now):
            heappop(self._timers)
        return self._timers[0][0] if self._timers else math.inf

    def move_to_next_timer(self) -> bool:
        """Let time pass until the next timer is due; says whether there is one."""
        due = self.next_timer()
        if due < math.inf:
            self.move(due - self.now + 1e-6)
        return due < math.inf


class SteppedExecutor(JobExecutor):
    """An executor whose jobs run when the schedule says so.

    Attributes:
        since: the loop's count of calls when its work could begin, or go on.
    """

    def __init__(self, loop: SteppedLoop) -> None:
        super().__init__(loop)
        self._stepped = loop
        self.since = 0

    def woken(self) -> None:
        self.since = self._stepped.calls

    def step(self) -> None:
        super().step()
        self.since = self._stepped.calls


class PausingEngine(WrappedEngine):
    """Pauses in each step, which takes `STEP_S`: anything may come between its plan and its results."""

    def __init__(self, inner: Engine, executor: SteppedExecutor, loop: SteppedLoop) -> None:
        super().__init__(inner)
        self._executor = executor
        self._loop = loop

    def step(self, plan: StepPlan) -> Sequence[Logits]:
        logits = super().step(plan)
        self._loop.move(STEP_S)
        self._executor.pause()
        return logits
