"""A target whose ranks are lost ends within its time, and a service whose device is lost at once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.engine.interface import Logits, StepPlan
from paceline.protocol.errors import PeerUnavailable
from paceline.runtime.process import FAILURE
from target_service import ranks
from target_service.ranks import LossWatch
from tests.services.harness import RecordingEngine, first_round, linked_target, target_open


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


class FailingEngine(RecordingEngine):
    """Every step fails, as every step does on a device that is lost."""

    error: Exception = RuntimeError("one bad step")

    def step(self, plan: StepPlan) -> Sequence[Logits]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "ends"), [(RuntimeError("one bad step"), False), (torch.AcceleratorError("illegal access"), True)]
)
async def test_an_error_that_stays_with_the_device_ends_the_process_and_any_other_its_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, ends: bool
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    engine = FailingEngine()
    engine.error = error
    async with linked_target(engine) as events:
        events.send(target_open(1, (1, 2)))
        await events.expect_failure(first_round(1, (1, 2)), "INTERNAL", closed=True)
    assert exits == [FAILURE] * ends
    assert ("the device is lost (illegal access)" in caplog.text) is ends
