"""Tasks that nobody waits for, until their owner closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundTasks:
    """One owner's tasks on the running event loop.

    Args:
        on_failure: called with the exception that a task has raised, which no caller sees.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it beside the caller. The loop itself would let go of a task that nothing else holds."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    async def close(self) -> None:
        """Cancel what runs, and return when all of it has ended."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
