"""Virtual time: a loop whose clock leaps to the next timer, and engines' threads that run on it."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from paceline.engine.executor import Executor
from paceline.runtime import clock

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
        neighbour: the executor whose work slows this one's; None: it has cores of its own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.busy_s = 0.0
        self.neighbour: TimedExecutor | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when it has begun or ended to take time."""
        self._left_s, self._slow_pace, self._pace, self._since = 0.0, 1.0, 1.0, 0.0
        self._end: asyncio.TimerHandle | None = None

    @property
    def is_taking_time(self) -> bool:
        """Whether a job is in the middle of its work."""
        return self._end is not None

    def beside(self, neighbour: TimedExecutor) -> None:
        """Share cores with an executor whose work slows this one's."""
        self.neighbour, neighbour.on_change = neighbour, self._change_pace

    def woken(self) -> None:
        """Begin."""
        self._loop.call_soon(self._advance)

    def take(self, seconds: float, slow_pace: float = 1.0) -> None:
        """Called by a job: let so much time pass, at `slow_pace` while the neighbour is at work."""
        self._left_s, self._slow_pace, self._since = seconds, slow_pace, self._loop.time()
        begun = self._since
        self._expect_end()
        self.on_change()
        self.pause()
        self._end = None
        self.busy_s += self._loop.time() - begun
        self.on_change()

    def close(self) -> None:
        """Drop all work."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        super().close()

    def _change_pace(self) -> None:
        if self._end is not None:
            self._left_s -= (self._loop.time() - self._since) * self._pace
            self._since = self._loop.time()
            self._end.cancel()
            self._expect_end()

    def _expect_end(self) -> None:
        is_slow = self.neighbour is not None and self.neighbour.is_taking_time
        self._pace = self._slow_pace if is_slow else 1.0
        self._end = self._loop.call_later(max(0.0, self._left_s) / self._pace, self._advance)

    def _advance(self) -> None:
        if not self.can_step:
            return  # it was closed meanwhile
        self.step()
        if self._running is None and self._waiting:
            self._loop.call_soon(self._advance)


def _settle(answer: asyncio.Future[Any], run: Callable[[], Any]) -> None:
    try:
        result = run()
    except Exception as error:  # noqa: BLE001 - it is for whoever waits for the job
        if not answer.done():
            answer.set_exception(error)
        return
    if not answer.done():
        answer.set_result(result)


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a loop of virtual time, on which all services measure meanwhile; what it left is ended.

    Raises:
        NothingHappens: it waits for what can't come.
    """
    with _virtual_loop() as loop:
        try:
            return loop.run_until_complete(main())
        finally:
            _end_tasks(loop)


@contextmanager
def _virtual_loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        with clock.running_on(loop.time):
            yield loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _end_tasks(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
