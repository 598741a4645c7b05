"""The one thread that owns a model.

Loading and every step run here, so the event loop answers health checks while a
forward pass runs, and no engine needs a lock.

Each step is handed over twice, to the thread and back, while nothing computes. A pool of `concurrent.futures` takes
twice as long for it, 0.27 ms where cores sleep in between (docs/decisions/2026-11-21-proposals-are-prefetched.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Call:
    run: Callable[[], Any]
    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Answer on the loop; nobody is left to be answered once the loop is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_settle, self.answer, result, error)

    def drop(self) -> None:
        """Have whoever waits for it cancelled."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.answer.cancel)


class Executor:
    """One named thread, which runs jobs in the order of their calls."""

    def __init__(self, name: str = "engine") -> None:
        self._jobs: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        self._closed = False

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn` on the thread and return what it returns or raises.

        Cancelling the caller drops a job that has not started; a started one
        runs to its end, since a half-done step would leave sessions torn.

        Raises:
            RuntimeError: the executor is closed.
        """
        if self._closed:
            raise RuntimeError("the executor is closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Call(partial(fn, *args, **kwargs), answer, loop))
        return await answer

    def close(self) -> None:
        """Drop waiting jobs, finish the running one, end the thread. Harmless when repeated."""
        self._closed = True
        with suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.drop()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.answer.cancelled():
                continue
            try:
                job.settle(job.run(), None)
            except BaseException as error:  # noqa: BLE001  whatever it is, it is for the caller
                job.settle(None, error)
            # A step's tensors must not live until the next job comes.
            del job


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
