"""The one thread that owns a model."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.engine.executor import Executor
from paceline.errors import Overloaded


async def test_jobs_share_one_thread_which_is_not_the_loops() -> None:
    executor = Executor()
    names = await asyncio.gather(*(executor.run(threading.get_ident) for _ in range(5)))
    assert len(set(names)) == 1
    assert names[0] != threading.get_ident()
    executor.close()


async def test_errors_come_back_and_the_thread_goes_on() -> None:
    executor = Executor()

    def refuse() -> None:
        raise Overloaded("full")

    with pytest.raises(Overloaded, match="full"):
        await executor.run(refuse)
    assert await executor.run(lambda a, b: a + b, 1, b=2) == 3
    executor.close()


async def test_the_loop_is_free_while_a_job_runs() -> None:
    executor = Executor()
    release = threading.Event()
    job = asyncio.create_task(executor.run(release.wait, 5.0))
    await asyncio.to_thread(lambda: None)
    assert not job.done()
    release.set()
    assert await job
    executor.close()


async def test_a_cancelled_waiting_job_never_runs() -> None:
    executor = Executor()
    release = threading.Event()
    ran: list[int] = []
    first = asyncio.create_task(executor.run(release.wait, 5.0))
    second = asyncio.create_task(executor.run(ran.append, 1))
    await asyncio.to_thread(lambda: None)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    await first
    executor.close()
    assert ran == []


def test_close_can_be_repeated() -> None:
    executor = Executor()
    executor.close()
    executor.close()
