"""Several targets and several draft services behind one coordinator: spread, handed over, added, removed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from paceline.client import AsyncClient
from paceline.client.shared import Collector
from paceline.local.service_process import Flags, ServiceName
from paceline.local.services import LocalServices
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.runtime.files import replace_text
from tests.e2e.cluster import eventually

TIMED = "table:vocab=300,seed=1,eos=299,step_ms=4"
NEAR = "table:vocab=300,seed=1,eos=299,noise=0.2,step_ms=1"
LENGTH = 150
PEERS = ("target-a", "target-b", "draft-a", "draft-b")


class Many(LocalServices):
    """Two targets, two draft services, and a coordinator that finds them by files."""

    def start_all(self) -> None:
        """Start everything, the coordinator when its peers serve."""
        for label in PEERS:
            name: ServiceName = "target" if label.startswith("target") else "draft"
            model: Flags = {"model": TIMED} if name == "target" else {"drafters": [f"model:{NEAR}"]}
            self.start(label, name, {"server.port": 0} | model)
        self.all_serve()
        flags: Flags = {"model": TIMED, "server.port": 0, "reconnect_max_ms": 200.0}
        flags |= {f"{role}.address": f"file:{self.folder / role}" for role in ("target", "draft")}
        self.start("coordinator", "coordinator", flags)
        self.await_serving("coordinator")
        self.await_links()

    def tell(self, role: str, *labels: str) -> None:
        """Write a role's endpoints."""
        replace_text(self.folder / role, "".join(f"{self.address_of(label)}\n" for label in labels))

    def sessions(self, label: str) -> int:
        return self.status(label).sessions

    def drain_count(self) -> int:
        """How many draft services the coordinator has let go."""
        return self.processes["coordinator"].log_file.read_text().count("drained: peer=draft")

    def all_serve(self) -> None:
        """Bring every peer back, and tell the coordinator."""
        for label in PEERS:
            if self.processes[label].exit_code is not None:
                self.start_again(label)
        self.await_serving(*PEERS)
        self.tell("target", "target-a", "target-b")
        self.tell("draft", "draft-a", "draft-b")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Many]:
    with Many(tmp_path_factory.mktemp("many")) as services:
        yield services


def request(number: int, *, off: bool = False) -> GenerateRequest:
    return GenerateRequest(
        token_ids=(10, 200, 30 + number),
        seed=number,
        max_new_tokens=LENGTH,
        ignore_eos=True,
        speculation=SpeculationSettings(off=off, num_draft_tokens=None if off else 3),
    )


class Streams:
    """Requests that run at once, and how far each is."""

    def __init__(self, services: Many, count: int) -> None:
        self.so_far = [Collector() for _ in range(count)]
        self._client = services.address
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    async def _run(self, number: int) -> None:
        async with AsyncClient(self._client) as client:
            async for event in client.stream(request(number)):
                self.so_far[number].add(event)

    async def are_under_way(self, tokens: int = 30) -> None:
        async with asyncio.timeout(30):
            while min(len(text.token_ids) for text in self.so_far) < tokens:  # noqa: ASYNC110 - streams have no event for it
                await asyncio.sleep(0.01)

    async def texts(self) -> list[tuple[int, ...]]:
        await asyncio.gather(*self._tasks)
        return [text.generation().token_ids for text in self.so_far]


async def alone(services: Many, count: int) -> list[tuple[int, ...]]:
    """The same texts, target-only, undisturbed."""
    async with AsyncClient(services.address) as client:
        wanted = [client.generate(request(number, off=True)) for number in range(count)]
        return [generation.token_ids for generation in await asyncio.gather(*wanted)]


async def test_sessions_are_spread_handed_over_and_follow_what_files_name(many: Many) -> None:
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
    many.tell("draft", "draft-b")
    again = Streams(many, 6)
    assert await again.texts() == expected
    await asyncio.to_thread(eventually, lambda: many.drain_count() > 0, "the draft that is no longer named is let go")
    assert many.sessions("draft-a") == 0
    many.tell("draft", "draft-a", "draft-b")
    later = [Streams(many, 4)]
    async with asyncio.timeout(10):
        while await asyncio.to_thread(many.sessions, "draft-a") == 0:
            later.append(Streams(many, 1))
            await later[-1].are_under_way()
    for each in later:
        assert await each.texts() == expected[: len(each.so_far)]
