"""The one thread that owns a model."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.engine.executor import Executor
from paceline.protocol.errors import Overloaded


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


async def test_close_ends_the_running_job_and_drops_those_that_wait() -> None:
    executor = Executor()
    entered, release = threading.Event(), threading.Event()
    ran: list[int] = []

    def long() -> int:
        entered.set()
        release.wait(5.0)
        return 7

    first = asyncio.create_task(executor.run(long))
    second = asyncio.create_task(executor.run(ran.append, 1))
    await asyncio.to_thread(entered.wait, 5.0)
    closing = asyncio.create_task(asyncio.to_thread(executor.close))
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    await closing
    assert await first == 7
    assert ran == []
    with pytest.raises(RuntimeError, match="closed"):
        await executor.run(long)


def test_a_job_that_outlives_its_loop_harms_nobody() -> None:
    executor = Executor()
    entered, release = threading.Event(), threading.Event()

    def long() -> None:
        entered.set()
        release.wait(5.0)

    async def leave() -> None:
        job = asyncio.create_task(executor.run(long))
        await asyncio.to_thread(entered.wait, 5.0)
        assert not job.done()

    asyncio.run(leave())
    release.set()
    assert asyncio.run(executor.run(lambda: 3)) == 3
    executor.close()


async def test_an_exit_inside_a_job_is_the_callers() -> None:
    executor = Executor()

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await executor.run(leave)
    assert await executor.run(lambda: 3) == 3
    executor.close()
