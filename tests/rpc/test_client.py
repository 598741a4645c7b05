"""The public client and streams that break: how long it goes on trying."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.client import AsyncClient, Client, Generation
from paceline.client.shared import models_of
from paceline.protocol import codec
from paceline.protocol.errors import Cancelled, Overloaded, PeerUnavailable, ProtocolMismatch
from paceline.protocol.generation import (
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Provenance,
    Started,
    Tokens,
)
from paceline.protocol.records import GenerationStats
from paceline.rpc.statuses import typed_errors
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc
from tests.rpc import harness
from tests.rpc.harness import silent_listener

REQUEST = GenerateRequest(token_ids=(1, 2), max_new_tokens=8)
WAIT_S = 0.35
"""Time for a few tries: the client pauses for up to 0.1 s, then up to 0.2 s and so on."""
HINT_MS = 120

Put = Callable[[GenerateEvent], Awaitable[None]]
Stream = Callable[[GenerateRequest, int, Put], Awaitable[None]]
"""What the coordinator does with a request, the how manieth it is and the way to the client."""


class Coordinator(pb_grpc.GenerationServiceServicer):
    """Refuses the first of all requests, notes when each came, and streams as it is told; `Started` comes first."""

    def __init__(self, stream: Stream, refusals: int = 0) -> None:
        self._stream, self._refusals = stream, refusals
        self.came: list[float] = []

    @property
    def streams(self) -> int:
        return len(self.came)

    @typed_errors
    async def Generate(self, request: Any, context: Any) -> None:
        self.came.append(time.monotonic())
        if self.streams <= self._refusals:
            raise Overloaded("full", retry_after_ms=HINT_MS)

        async def put(event: GenerateEvent) -> None:
            await context.write(codec.encode_generate_event(event))

        await put(Started(7, REQUEST.token_ids or (), "table"))
        await self._stream(codec.decode_generate_request(request), self.streams, put)


@asynccontextmanager
async def listening(coordinator: Coordinator) -> AsyncIterator[str]:
    async with harness.serving(coordinator, add=pb_grpc.add_GenerationServiceServicer_to_server) as port:
        yield f"127.0.0.1:{port}"


async def generate(address: str, threads: bool, **patience: float) -> Generation:
    client = client_of(address, threads, **({"resume_wait_s": WAIT_S} | patience))
    try:
        return await _read(client)
    finally:
        await close(client)


def client_of(address: str, threads: bool, **options: Any) -> Client | AsyncClient:
    return (Client if threads else AsyncClient)(address, timeout_s=10, **options)


async def close(client: Client | AsyncClient) -> None:
    if isinstance(client, Client):
        await asyncio.to_thread(client.close)
    else:
        await client.close()


async def dies(request: GenerateRequest, number: int, put: Put) -> None:
    raise PeerUnavailable("the target is dead")


async def ends(request: GenerateRequest, number: int, put: Put) -> None:
    await put(Finished(FinishReason.LENGTH, "", GenerationStats()))


@pytest.mark.parametrize("threads", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_a_stream_that_only_ever_starts_is_given_up(threads: bool) -> None:
    async with listening(coordinator := Coordinator(dies)) as address:
        with pytest.raises(PeerUnavailable, match="the target is dead"):
            await generate(address, threads)
    assert 2 <= coordinator.streams <= 8


@pytest.mark.parametrize("threads", [pytest.param(False, marks=pytest.mark.full), True])
async def test_tokens_earn_new_tries_and_every_one_counts(threads: bool) -> None:
    async def one_token(request: GenerateRequest, number: int, put: Put) -> None:
        arrived = len(request.resume_token_ids)
        assert request.resume_token_ids == tuple(range(arrived))
        if arrived == 6:
            await ends(request, number, put)
        else:
            await put(Tokens((arrived,), "a", (Provenance.TARGET,)))
            raise PeerUnavailable("the target died again")

    async with listening(coordinator := Coordinator(one_token)) as address:
        generation = await generate(address, threads)
    assert generation.token_ids == tuple(range(6))
    assert coordinator.streams == 7


async def test_a_stream_that_breaks_after_a_long_wait_is_resumed() -> None:
    short_s = 0.1

    async def waits_and_breaks(request: GenerateRequest, number: int, put: Put) -> None:
        if number == 1:
            await asyncio.sleep(2 * short_s)
            raise PeerUnavailable("the coordinator was restarted")
        await ends(request, number, put)

    async with listening(coordinator := Coordinator(waits_and_breaks)) as address:
        await generate(address, False, resume_wait_s=short_s)
    assert coordinator.streams == 2


async def test_a_text_that_has_begun_goes_on_where_there_is_no_room_at_first() -> None:
    """The coordinator that had it is gone; the one that takes its place is full of those who came sooner."""

    async def breaks_then_is_full(request: GenerateRequest, number: int, put: Put) -> None:
        if number == 1:
            await put(Tokens((0,), "a", (Provenance.TARGET,)))
            raise PeerUnavailable("the coordinator was restarted")
        if number == 2:
            raise Overloaded("full", retry_after_ms=HINT_MS)
        assert request.resume_token_ids == (0,)
        await ends(request, number, put)

    async with listening(coordinator := Coordinator(breaks_then_is_full)) as address:
        generation = await generate(address, False)
    assert generation.token_ids == (0,)
    assert coordinator.streams == 3


@pytest.mark.parametrize("threads", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_a_request_without_room_is_asked_again_if_its_client_is_patient(threads: bool) -> None:
    async with listening(full := Coordinator(ends, refusals=2)) as address:
        await generate(address, threads, overload_wait_s=5)
    first, second, third = full.came
    assert min(second - first, third - second) >= HINT_MS / 1e3, "no sooner than it was told"


async def test_a_request_without_room_is_refused_at_once_unless_its_client_is_patient() -> None:
    async with listening(full := Coordinator(ends, refusals=1)) as address, AsyncClient(address) as client:
        with pytest.raises(Overloaded) as caught:
            await client.generate(REQUEST)
        assert caught.value.retry_after_ms == HINT_MS
        assert full.streams == 1
        await client.generate(REQUEST)


@pytest.mark.parametrize("threads", [False, True])
async def test_a_stream_that_breaks_behind_its_end_has_ended(threads: bool) -> None:
    async def breaks_behind(request: GenerateRequest, number: int, put: Put) -> None:
        await put(Tokens((5,), "a", (Provenance.TARGET,)))
        await put(Finished(FinishReason.STOP, "b", GenerationStats()))
        raise PeerUnavailable("the connection was cut")

    async with listening(coordinator := Coordinator(breaks_behind)) as address:
        client = client_of(address, threads, resume_wait_s=WAIT_S)
        if isinstance(client, Client):
            events = await asyncio.to_thread(list, client.stream(REQUEST))
        else:
            events = [event async for event in client.stream(REQUEST)]
        await close(client)
    assert [type(event) for event in events] == [Started, Tokens, Finished]
    assert coordinator.streams == 1


@pytest.mark.parametrize("threads", [False, True])
async def test_a_stream_whose_client_is_closed_ends_with_cancelled(threads: bool) -> None:
    begun = asyncio.Event()

    async def waits(request: GenerateRequest, number: int, put: Put) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with listening(Coordinator(waits)) as address:
        client = client_of(address, threads)
        reading = asyncio.create_task(_read(client))
        await begun.wait()
        await close(client)
        with pytest.raises(Cancelled):
            await reading


@pytest.mark.parametrize("threads", [False, True])
async def test_a_client_that_was_closed_says_so_at_the_next_try(threads: bool) -> None:
    """As it finds between two tries of a stream that broke; gRPC's errors of a closed channel have two types."""
    client = client_of("127.0.0.1:1", threads)
    await close(client)
    with pytest.raises(Cancelled, match="the client was closed"):
        await _read(client)
    with pytest.raises(Cancelled, match="the client was closed"):
        await (asyncio.to_thread(client.describe_models) if isinstance(client, Client) else client.describe_models())


def test_a_coordinator_that_names_no_model_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolMismatch, match="describes no model"):
        models_of(pb.DescribeModelsResponse())


async def test_a_question_whose_client_is_closed_ends_with_cancelled() -> None:
    async with silent_listener() as port:
        client = AsyncClient(f"127.0.0.1:{port}", timeout_s=10)
        asked = asyncio.create_task(client.describe_models())
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(Cancelled):
            await asked


async def _read(client: Client | AsyncClient) -> Generation:
    async with asyncio.timeout(20):
        if isinstance(client, Client):
            return await asyncio.to_thread(client.generate, REQUEST)
        return await client.generate(REQUEST)
