"""The one thread that owns a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engine.executor import Executor
from paceline.protocol.errors import Overloaded


@pytest.fixture
def executor() -> Iterator[Executor]:
    """Closed twice where a test closes it: that does no harm."""
    executor = Executor()
    yield executor
    executor.close()


class Gate:
    """A job that has been entered, and goes on when it may."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def pass_through(self) -> int:
        self.entered.set()
        assert self.release.wait(5.0)
        return 7


async def test_jobs_share_one_thread_which_is_not_the_loops(executor: Executor) -> None:
    names = await asyncio.gather(*(executor.run(threading.get_ident) for _ in range(5)))
    assert len(set(names)) == 1
    assert names[0] != threading.get_ident()


@pytest.mark.parametrize("error", [Overloaded("full"), SystemExit(3)])
async def test_errors_and_exits_are_the_callers_and_the_thread_goes_on(executor: Executor, error: Any) -> None:
    def refuse() -> None:
        raise error

    with pytest.raises(type(error), match=r"full|3"):
        await executor.run(refuse)
    assert await executor.run(lambda a, b: a + b, 1, b=2) == 3


async def test_the_loop_is_free_while_a_job_runs_and_a_cancelled_waiting_job_never_runs(executor: Executor) -> None:
    gate, runs = Gate(), list[int]()
    first = asyncio.create_task(executor.run(gate.pass_through))
    second = asyncio.create_task(executor.run(runs.append, 1))
    await asyncio.to_thread(gate.entered.wait, 5.0)
    assert not first.done()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.release.set()
    assert await first == 7
    executor.close()
    assert runs == []


async def test_close_ends_the_running_job_and_drops_those_that_wait(executor: Executor) -> None:
    gate, runs = Gate(), list[int]()
    first = asyncio.create_task(executor.run(gate.pass_through))
    second = asyncio.create_task(executor.run(runs.append, 1))
    await asyncio.to_thread(gate.entered.wait, 5.0)
    closing = asyncio.create_task(asyncio.to_thread(executor.close))
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.release.set()
    await closing
    assert await first == 7
    assert runs == []
    with pytest.raises(RuntimeError, match="closed"):
        await executor.run(gate.pass_through)


def test_a_job_that_outlives_its_loop_harms_nobody(executor: Executor) -> None:
    gate = Gate()

    async def leave() -> None:
        job = asyncio.create_task(executor.run(gate.pass_through))
        await asyncio.to_thread(gate.entered.wait, 5.0)
        assert not job.done()

    asyncio.run(leave())
    gate.release.set()
    assert asyncio.run(executor.run(lambda: 3)) == 3
