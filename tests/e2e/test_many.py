"""Several targets and several draft services behind one coordinator: spread, handed over, added, removed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from paceline.client import AsyncClient
from paceline.client.shared import Collector
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from tests.e2e.cluster import eventually
from tests.e2e.many_services import COORDINATORS, PEERS, ManyServices

TIMED = "table:vocab=300,seed=1,eos=299,step_ms=4"
NEAR = "table:vocab=300,seed=1,eos=299,noise=0.2,step_ms=1"
LENGTH = 150


class Many(ManyServices):
    """The services, seen through the first coordinator."""

    @property
    def address(self) -> str:
        return self.address_of(COORDINATORS[0])

    def sessions(self, label: str) -> int:
        return self.status(label).sessions

    def log(self) -> str:
        return self.processes[COORDINATORS[0]].log_file.read_text()

    def all_serve(self) -> None:
        """Bring every service back, and tell the coordinators."""
        ended = [label for label in PEERS if self.processes[label].exit_code is not None]
        for label in ended:
            self.start_again(label)
        self.await_serving(*ended)
        self.tell("target", "target-a", "target-b")
        self.tell("draft", "draft-a", "draft-b")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Many]:
    with Many(tmp_path_factory.mktemp("many"), TIMED, NEAR) as services:
        yield services


@pytest.fixture
def many(running: Many) -> Many:
    running.all_serve()
    return running


def request(number: int, length: int = LENGTH, *, off: bool = False) -> GenerateRequest:
    return GenerateRequest(
        token_ids=(10, 200, 30 + number),
        seed=number,
        max_new_tokens=length,
        ignore_eos=True,
        speculation=SpeculationSettings(off=off, num_draft_tokens=None if off else 3),
    )


class Streams:
    """Requests that run at once, and how far each is."""

    def __init__(self, services: Many, count: int, length: int = LENGTH) -> None:
        self.so_far = [Collector() for _ in range(count)]
        self._client = services.address
        self._length = length
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    async def _run(self, number: int) -> None:
        async with AsyncClient(self._client) as client:
            async for event in client.stream(request(number, self._length)):
                self.so_far[number].add(event)

    async def are_under_way(self, tokens: int = 30) -> None:
        async with asyncio.timeout(30):
            while min(len(text.token_ids) for text in self.so_far) < tokens:  # noqa: ASYNC110 - streams have no event for it
                await asyncio.sleep(0.01)

    async def texts(self) -> list[tuple[int, ...]]:
        await asyncio.gather(*self._tasks)
        return [text.generation().token_ids for text in self.so_far]


async def alone(services: Many, count: int, length: int = LENGTH) -> list[tuple[int, ...]]:
    """The same texts, target-only, undisturbed."""
    async with AsyncClient(services.address) as client:
        wanted = [client.generate(request(number, length, off=True)) for number in range(count)]
        return [generation.token_ids for generation in await asyncio.gather(*wanted)]


async def test_sessions_are_spread_and_a_killed_target_hands_its_own_over(many: Many) -> None:
    expected = await alone(many, 6)
    streams = Streams(many, 6)
    await streams.are_under_way()
    loads = [await asyncio.to_thread(many.sessions, label) for label in PEERS]
    assert min(loads) >= 1, loads
    many.kill("target-a")
    await streams.are_under_way(60)
    assert await asyncio.to_thread(many.sessions, "target-b") == 6
    assert await streams.texts() == expected
    many.all_serve()
    again = Streams(many, 6, 40)
    assert await again.texts() == [text[:40] for text in expected]


async def test_a_draft_service_is_added_under_load_and_one_removed(many: Many) -> None:
    expected = await alone(many, 4, 300)
    many.tell("draft", "draft-a")
    eventually(lambda: many.log().count("drained: peer=draft") >= 1, "drained")
    streams = Streams(many, 4, 300)
    await streams.are_under_way()
    assert await asyncio.to_thread(many.sessions, "draft-b") == 0
    many.tell("draft", "draft-b")
    later = [Streams(many, 4, 100)]
    async with asyncio.timeout(10):
        while await asyncio.to_thread(many.sessions, "draft-b") == 0:
            later.append(Streams(many, 1, 100))
            await later[-1].are_under_way()
    for each in later:
        assert await each.texts() == [text[:100] for text in expected[: len(each.so_far)]]
    assert await streams.texts() == expected
    await asyncio.to_thread(eventually, lambda: many.sessions("draft-a") == 0, "draft-a is empty")
