"""Tasks that nobody waits for."""

from __future__ import annotations

import asyncio

import pytest

from paceline.runtime.background import BackgroundTasks


async def test_what_a_task_raises_is_told_and_the_others_go_on() -> None:
    told: asyncio.Queue[BaseException] = asyncio.Queue()
    tasks, gate, done = BackgroundTasks(told.put_nowait), asyncio.Event(), asyncio.Event()
    error = RuntimeError("broken")

    async def fail() -> None:
        raise error

    async def go_on() -> None:
        await gate.wait()
        done.set()

    tasks.spawn(go_on())
    tasks.spawn(fail())
    async with asyncio.timeout(5):
        assert await told.get() is error
        gate.set()
        await done.wait()
        await tasks.close()
    assert told.empty()


async def test_closing_cancels_what_runs_waits_for_its_end_and_tells_nothing() -> None:
    tasks, began, ended = BackgroundTasks(lambda error: pytest.fail(str(error))), asyncio.Event(), asyncio.Event()

    async def run() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    tasks.spawn(run())
    async with asyncio.timeout(5):
        await began.wait()
        await tasks.close()
    assert ended.is_set()
