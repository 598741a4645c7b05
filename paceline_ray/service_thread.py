"""A service's `serve()` on a thread of an actor's process, with a loop of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from paceline.protocol.errors import PacelineError
from paceline.runtime.process import FAILURE, REFUSALS
from paceline_ray.records import ActorState

logger = logging.getLogger(__name__)


class ServiceThread:
    """Runs a service until it ends or is stopped.

    A service that refuses its configuration leaves the process alive to report it. A service that fails ends the
    process, and Ray starts a new one: an engine or a group of ranks can't be used after a failure.
    """

    def __init__(self, name: str, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start at once; `start` returns the coroutine to run and is called on the thread."""
        self.outcome: ActorState | None = None
        self.detail = ""
        self._name = name
        self._start = start
        self._task: concurrent.futures.Future[asyncio.Task[None]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Drain as on SIGTERM; returns whether the service has ended within `timeout_s`."""
        task = self._task.result()
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
            task.get_loop().call_soon_threadsafe(task.cancel)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the service; returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except asyncio.CancelledError:
            self.outcome = ActorState.STOPPED
        except PacelineError as error:
            if not isinstance(error, REFUSALS):
                self._end_process(error)
            logger.error("%s refused: %s", self._name, error.message)
            self.detail, self.outcome = error.message, ActorState.REFUSED
        except BaseException as error:  # noqa: BLE001 - a process without its service must not look alive
            self._end_process(error)
        else:
            self.outcome = ActorState.STOPPED

    async def _main(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task.set_result(task)
        # Cancelling it is what SIGTERM is to a container: its `finally` drains.
        await self._start()

    def _end_process(self, error: BaseException) -> None:
        logger.critical("%s failed, its process ends: error=%r", self._name, error, exc_info=error)
        logging.shutdown()
        os._exit(FAILURE)
