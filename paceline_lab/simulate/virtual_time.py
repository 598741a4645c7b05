"""Virtual time: a loop whose clock leaps to the next timer, and engines' threads that run on it."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from paceline.costs.cost_line import CostLine
from paceline.engine.executor import Executor
from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.wrapped import WrappedEngine

BEGIN_S = 1_000.0
"""The clock of a new loop: above 0, which some take for never."""

P = ParamSpec("P")
T = TypeVar("T")


class NothingHappens(RuntimeError):
    """No callback is ready and no timer is set, and something is waited for."""


class _LeapingSelector(selectors.DefaultSelector):
    """Waits for nothing: time passes instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise NothingHappens("nothing is ready, and no timer is set")
            self.now += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready; when nothing is, its time is that of the next timer."""

    def __init__(self) -> None:
        self._leaping = _LeapingSelector()
        super().__init__(self._leaping)
        # Two timers of one moment differ by rounding alone.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._leaping.now


class JobExecutor(Executor):
    """An executor whose jobs run on the loop's own thread, each from one pause to the next in `step`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._running: greenlet | None = None

    @property
    def can_step(self) -> bool:
        """Whether there is work."""
        return self._running is not None or bool(self._waiting)

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn` behind the jobs before it, and return what it returns or raises."""
        answer: asyncio.Future[T] = self._loop.create_future()
        was_idle = not self.can_step
        self._waiting.append(partial(_settle, answer, partial(fn, *args, **kwargs)))
        if was_idle:
            self.woken()
        return await answer

    def woken(self) -> None:
        """Called when an idle executor has got a job."""

    def step(self) -> None:
        """Run the job to its next pause, or to its end; begin the next one if there is none."""
        if self._running is None:
            self._running = greenlet(self._waiting.popleft())
        self._running.switch()
        if self._running.dead:
            self._running = None

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


class TimedExecutor(JobExecutor):
    """Runs its jobs by itself; a job takes the time that it asks for, and none else.

    Attributes:
        busy_s: time that its jobs have taken.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.busy_s = 0.0

    @property
    def is_taking_time(self) -> bool:
        """Whether a job is in the middle of its work."""
        return self._running is not None

    def woken(self) -> None:
        """Begin."""
        self._loop.call_soon(self._advance)

    def take(self, seconds: float) -> None:
        """Called by a job: let so much time pass."""
        self.busy_s += seconds
        self._loop.call_later(seconds, self._advance)
        self.pause()

    def _advance(self) -> None:
        if not self.can_step:
            return  # it was closed meanwhile
        self.step()
        if self._running is None and self._waiting:
            self._loop.call_soon(self._advance)


class TimedEngine(WrappedEngine):
    """An engine whose steps take the time of a line, by their rows.

    Args:
        line: of a step, in milliseconds.
        beside: of a step that runs while another executor is at work on the same cores; unknown: as `line`.
        other: that executor; None: there is none.
    """

    def __init__(
        self,
        inner: Engine,
        executor: TimedExecutor,
        line: CostLine,
        beside: CostLine | None = None,
        other: TimedExecutor | None = None,
    ) -> None:
        super().__init__(inner)
        self.steps = 0
        self._executor = executor
        self._line, self._beside = line, line if beside is None or not beside.is_known else beside
        self._other = other

    def step(self, plan: StepPlan) -> Sequence[Logits]:
        """Compute the step, and take its time."""
        logits = super().step(plan)
        self.steps += 1
        is_shared = self._other is not None and self._other.is_taking_time
        self._executor.take((self._beside if is_shared else self._line).ms(plan.rows) / 1e3)
        return logits


def _settle(answer: asyncio.Future[Any], run: Callable[[], Any]) -> None:
    try:
        result = run()
    except Exception as error:  # noqa: BLE001 - it is for whoever waits for the job
        if not answer.done():
            answer.set_exception(error)
        return
    if not answer.done():
        answer.set_result(result)
