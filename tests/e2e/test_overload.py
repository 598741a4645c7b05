"""More than there is room for: who has a place keeps it, the others are told when to come, and no key takes all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.access.keys import new_key
from paceline.client import AsyncClient, GenerateRequest, Overloaded, SpeculationSettings, Tokens
from tests.e2e.cluster import eventually
from tests.e2e.keys import write_keys
from tests.gateway.gateways import Answer, GatewayCluster, post

PLACES = 10
"""All of them may be one key's: two more wait, if they are others'."""
TIMES = 10
STEP_MS = 5
TIMED = f"table:vocab=300,seed=1,eos=299,step_ms={STEP_MS},max_length=4096"
KEYS = {name: new_key() for name in ("flood", "calm")}
OFF = SpeculationSettings(off=True)
ENDLESS = GenerateRequest(token_ids=(1, 2, 3), max_new_tokens=4000, seed=5, ignore_eos=True, speculation=OFF)
SHORT = GenerateRequest(token_ids=(1, 2, 3), max_new_tokens=16, seed=5, ignore_eos=True, speculation=OFF)
COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 16, "seed": 5, "ignore_eos": True, "paceline": {"off": True}}


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayCluster]:
    folder = tmp_path_factory.mktemp("crowded")
    file = folder / "keys.json"
    write_keys(file, KEYS)
    limits: dict[str, Any] = {"max_concurrent_requests": PLACES, "api_keys": str(file)}
    cluster = GatewayCluster(folder, target_model=TIMED, coordinator_flags=limits)
    cluster.api_key = KEYS["calm"]
    with cluster:
        yield cluster


def client_of(cluster: GatewayCluster, name: str, **options: Any) -> AsyncClient:
    return AsyncClient(cluster.address, api_key=KEYS[name], timeout_s=60, **options)


async def over_http(cluster: GatewayCluster, name: str) -> Answer:
    key = f"Bearer {KEYS[name]}"
    address = cluster.address_of("gateway")
    return await asyncio.to_thread(post, address, "/v1/completions", COMPLETION, Authorization=key)


@asynccontextmanager
async def flooded(cluster: GatewayCluster) -> AsyncIterator[tuple[list[list[int]], list[asyncio.Task[None]]]]:
    """Texts of the flooding key that have begun and go on, as many as there are places, and who reads them."""
    texts: list[list[int]] = [[] for _ in range(PLACES)]
    begun = [asyncio.Event() for _ in texts]

    async def read(client: AsyncClient, place: int) -> None:
        async for event in client.stream(ENDLESS):
            if isinstance(event, Tokens):
                texts[place] += event.token_ids
                begun[place].set()

    async with client_of(cluster, "flood") as client, asyncio.TaskGroup() as group:
        readers = [group.create_task(read(client, place)) for place in range(PLACES)]
        async with asyncio.timeout(20):
            await asyncio.gather(*(event.wait() for event in begun))
        yield texts, readers
        for reader in readers:
            reader.cancel()


async def test_a_flood_is_told_at_once_when_to_come_and_another_key_has_the_first_place(
    crowded: GatewayCluster,
) -> None:
    async with client_of(crowded, "flood") as client, client_of(crowded, "calm") as calm:
        alone = (await client.generate(SHORT)).token_ids
        async with flooded(crowded) as (texts, readers):
            before = [len(text) for text in texts]
            asked = [client.generate(SHORT) for _ in range(TIMES * PLACES)]
            refused = await asyncio.gather(*asked, return_exceptions=True)
            answers = await asyncio.gather(*(over_http(crowded, "flood") for _ in range(TIMES)))
            assert {type(each) for each in refused} == {Overloaded}
            hints = {error.retry_after_ms for error in refused if isinstance(error, Overloaded)}
            assert all(hint and hint < 5_000 for hint in hints), hints
            assert {(answer.status, answer.headers["retry-after"]) for answer in answers} == {(429, "1")}
            await asyncio.to_thread(
                eventually,
                lambda: all(len(text) > max(was, len(alone)) + 5 for text, was in zip(texts, before, strict=True)),
                "they go on",
            )
            waiting = asyncio.create_task(calm.generate(SHORT))
            with pytest.raises(Overloaded, match=f"max_concurrent_requests = {PLACES}: the key has {PLACES} of them"):
                await client.generate(SHORT)
            assert not waiting.done(), "it waits, and is not refused"
            readers[-1].cancel()
            assert len((await waiting).token_ids) == SHORT.max_new_tokens
        assert all(tuple(text[: len(alone)]) == alone for text in texts)
        await asyncio.to_thread(crowded.wait_idle)
        assert (await client.generate(SHORT)).token_ids == alone
        assert (await over_http(crowded, "flood")).status == 200
