"""The ranks of a target service: how their engine is loaded, and the end of the service when a rank is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from paceline.engine.parallel.launch import RankProcesses
from paceline.engine.parallel.place import Place
from paceline.protocol.errors import PeerUnavailable
from paceline.runtime.config import TargetConfig
from paceline.runtime.process import FAILURE
from paceline.sampling import racing

if TYPE_CHECKING:
    from paceline.engine.interface import Engine
    from paceline.engine.parallel.engine import ParallelEngine

logger = logging.getLogger(__name__)

EXIT_SECONDS = 3.0
"""After a loss the process ends within this time, even if a broken collective still waits."""


class LossWatch:
    """Notices the loss of the engine, and ends the service. It is made on the event loop."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.loss = asyncio.Event()
        self.reason: str | None = None
        self._loop = asyncio.get_running_loop()

    def lose(self, reason: str) -> None:
        """End the service, from any thread; the first reason counts."""
        with suppress(RuntimeError):  # the loop has ended, and the service with it
            self._loop.call_soon_threadsafe(self._lose, reason)

    def _lose(self, reason: str) -> None:
        if self.reason is not None:
            return
        logger.error("engine lost: %s", reason)
        self.reason = reason
        self.loss.set()
        self.stop.set()
        last_resort = threading.Timer(EXIT_SECONDS, os._exit, (FAILURE,))
        last_resort.daemon = True
        try:
            last_resort.start()
        except RuntimeError:
            # Without a thread to wait on, nothing would end a process that still waits for a broken collective.
            os._exit(FAILURE)

    def check(self) -> None:
        """Raise `PeerUnavailable` if the engine was lost."""
        if self.reason is not None:
            raise PeerUnavailable(self.reason)


@contextmanager
def engine_loader(config: TargetConfig, place: Place | None, watch: LossWatch) -> Iterator[Callable[[], Engine]]:
    """Start the other ranks; yields a function that loads the engine, to be called on the executor's thread.

    Args:
        config: the service's.
        place: of this process, where torchrun has started all ranks; None: the others are started here.
        watch: notified when a rank is lost.
    """
    if config.tensor_parallel_size == 1:
        yield lambda: _load(config)
        return
    ranks = RankProcesses(config.model, config.engine, config.tensor_parallel_size) if place is None else None
    engine: ParallelEngine | None = None

    def load() -> Engine:
        nonlocal engine
        from paceline.engine.parallel.loading import lead

        racing.warm_up()
        if ranks is not None:
            engine = lead(config.model, config.engine, ranks.place, ranks.listener, partial(_lose, ranks, watch))
        else:
            assert place is not None
            engine = lead(config.model, config.engine, place, None, watch.lose)
        return engine

    if ranks is not None:
        ranks.watch(watch.lose)
    try:
        yield load
    finally:
        is_sound = engine is not None and watch.reason is None
        if engine is not None and is_sound:
            engine.stop()
        if ranks is not None:
            ranks.close(graceful=is_sound)


def _lose(ranks: RankProcesses, watch: LossWatch, error: str) -> None:
    watch.lose(ranks.why_lost(error))


def _load(config: TargetConfig) -> Engine:
    from paceline.engine.loading import load_engine

    racing.warm_up()
    return load_engine(config.model, config.engine)
