"""An event loop whose clock stands still, and jobs of an engine's thread that run from one pause to the next."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from heapq import heappop, heappush
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from paceline.engine.executor import Executor
from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.wrapped import WrappedEngine

STEP_S = 0.005
"""What each step of an engine takes on the clock."""

P = ParamSpec("P")
T = TypeVar("T")
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


class SteppedExecutor(Executor):
    """An executor whose jobs run only in `step`, on the loop's thread, up to their next pause.

    Attributes:
        since: the loop's count of calls when its work could begin, or go on.
    """

    def __init__(self, loop: SteppedLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._running: greenlet | None = None
        self.since = 0

    @property
    def can_step(self) -> bool:
        """Whether there is work."""
        return self._running is not None or bool(self._waiting)

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        answer: asyncio.Future[T] = self._loop.create_future()
        if not self.can_step:
            self.since = self._loop.calls
        self._waiting.append(partial(_settle, answer, partial(fn, *args, **kwargs)))
        return await answer

    def step(self) -> None:
        """Run the job to its next pause, or to its end; begin the next one if there is none."""
        if self._running is None:
            self._running = greenlet(self._waiting.popleft())
        self._running.switch()
        if self._running.dead:
            self._running = None
        self.since = self._loop.calls

    def pause(self) -> None:
        """Called by a job: wait for the next `step`."""
        job = getcurrent()
        assert job.parent is not None, "a job runs in `step`"
        job.parent.switch()

    def close(self) -> None:
        """Drop all work."""
        self._waiting.clear()
        if self._running is not None:
            self._running.throw()
            self._running = None


def _settle(answer: asyncio.Future[Any], run: Callable[[], Any]) -> None:
    try:
        result = run()
    except Exception as error:  # noqa: BLE001 - it is for whoever waits for the job
        if not answer.done():
            answer.set_exception(error)
        return
    if not answer.done():
        answer.set_result(result)


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
