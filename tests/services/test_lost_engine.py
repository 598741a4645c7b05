"""A target whose ranks are lost ends within its time."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from paceline.protocol.errors import PeerUnavailable
from paceline.runtime.process import FAILURE
from target_service import ranks
from target_service.ranks import LossWatch


@pytest.mark.parametrize("threads", [True, False])
async def test_a_lost_engine_ends_the_process_in_time_even_where_no_thread_can_wait(
    monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    ended: list[int] = []
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()

    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    def end(code: int) -> None:
        ended.append(code)
        loop.call_soon_threadsafe(gone.set)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(ranks, "EXIT_SECONDS", 0.01)
    if not threads:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    watch = LossWatch()
    watch.lose("rank 1 ended with exit code 9")
    watch.lose("another call failed, too")
    await watch.loss.wait()
    assert watch.stop.is_set()
    with pytest.raises(PeerUnavailable, match="rank 1 ended"):
        watch.check()
    async with asyncio.timeout(5):
        await gone.wait()
    assert ended == [FAILURE]
