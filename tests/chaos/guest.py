"""A draft service in this process whose drafter reads features: tables have none that would, so a spy does."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from draft_service.drafters.interface import DrafterManifest
from draft_service.servicer import DraftServicer
from paceline.engine.table.engine import TableEngine
from paceline.models.table_names import TableSpec
from tests.services.feature_spy import NEED, FeatureSpy
from tests.services.harness import draft_service

NAME = "features"
START_S = 20.0


class GuestDraft:
    """Runs in a thread of its own; a context manager."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._ready = threading.Event()
        self._servicer: DraftServicer | None = None
        self.address = ""

    def __enter__(self) -> GuestDraft:
        self._thread.start()
        assert self._ready.wait(START_S), "the guest serves"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def sessions(self) -> int:
        assert self._servicer is not None
        return self._servicer.scheduler.sessions

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        engine = TableEngine(TableSpec.parse(self._model))
        spy = FeatureSpy(engine)
        spy.manifest = DrafterManifest(NAME, NEED)
        async with draft_service(engine, drafter=spy, name=NAME) as (self._servicer, self.address):
            self._ready.set()
            await self._stop.wait()
