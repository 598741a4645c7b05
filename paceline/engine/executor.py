"""The one thread that owns a model.

Loading and every step run here, so the event loop answers health checks while a
forward pass runs, and no engine needs a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Executor:
    """One named thread; jobs run in the order they were given."""

    def __init__(self, name: str = "engine") -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn` on the thread and return what it returns or raises.

        Cancelling the caller drops a job that has not started; a started one
        runs to its end, since a half-done step would leave sessions torn.
        """
        future = self._pool.submit(fn, *args, **kwargs)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop waiting jobs, finish the running one, end the thread. Harmless when repeated."""
        self._pool.shutdown(wait=True, cancel_futures=True)
