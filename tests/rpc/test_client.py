"""The public client and streams that break: how long it goes on trying."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from paceline.client import AsyncClient, Client, Generation
from paceline.protocol import codec
from paceline.protocol.errors import PeerUnavailable
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
from paceline.v1 import generation_service_pb2_grpc as pb_grpc

REQUEST = GenerateRequest(token_ids=(1, 2), max_new_tokens=8)
WAIT_S = 0.35
"""Time for a few tries; the client pauses 0.1 s between two."""

Put = Callable[[GenerateEvent], Awaitable[None]]
Stream = Callable[[GenerateRequest, int, Put], Awaitable[None]]
"""What the coordinator does with a request, the how manieth it is and the way to the client."""


class Coordinator(pb_grpc.GenerationServiceServicer):
    """Streams as it is told; every stream begins with `Started`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.streams = 0

    @typed_errors
    async def Generate(self, request: Any, context: Any) -> None:
        wanted = codec.decode_generate_request(request)
        self.streams += 1

        async def put(event: GenerateEvent) -> None:
            await context.write(codec.encode_generate_event(event))

        await put(Started(7, REQUEST.token_ids or (), "table"))
        await self._stream(wanted, self.streams, put)


@asynccontextmanager
async def serving(stream: Stream) -> AsyncIterator[tuple[Coordinator, str]]:
    server = grpc.aio.server()
    coordinator = Coordinator(stream)
    pb_grpc.add_GenerationServiceServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield coordinator, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def generate(address: str, threads: bool) -> Generation:
    async with asyncio.timeout(20):
        if threads:
            with Client(address, timeout_s=10, resume_wait_s=WAIT_S) as client:
                return await asyncio.to_thread(client.generate, REQUEST)
        async with AsyncClient(address, timeout_s=10, resume_wait_s=WAIT_S) as patient:
            return await patient.generate(REQUEST)


async def dies(request: GenerateRequest, number: int, put: Put) -> None:
    raise PeerUnavailable("the target is dead")


async def ends(put: Put) -> None:
    await put(Finished(FinishReason.LENGTH, "", GenerationStats()))


@pytest.mark.parametrize("threads", [False, True])
async def test_a_stream_that_only_ever_starts_is_given_up(threads: bool) -> None:
    async with serving(dies) as (coordinator, address):
        with pytest.raises(PeerUnavailable, match="the target is dead"):
            await generate(address, threads)
    assert 2 <= coordinator.streams <= 5


@pytest.mark.parametrize("threads", [False, True])
async def test_tokens_earn_new_tries_and_every_one_counts(threads: bool) -> None:
    async def one_token(request: GenerateRequest, number: int, put: Put) -> None:
        arrived = len(request.resume_token_ids)
        assert request.resume_token_ids == tuple(range(arrived))
        if arrived == 6:
            await ends(put)
        else:
            await put(Tokens((arrived,), "a", (Provenance.TARGET,)))
            raise PeerUnavailable("the target died again")

    async with serving(one_token) as (coordinator, address):
        generation = await generate(address, threads)
    assert generation.token_ids == tuple(range(6))
    assert coordinator.streams == 7


async def test_a_stream_that_breaks_after_a_long_wait_is_resumed() -> None:
    async def waits_and_breaks(request: GenerateRequest, number: int, put: Put) -> None:
        if number == 1:
            await asyncio.sleep(2 * WAIT_S)
            raise PeerUnavailable("the coordinator was restarted")
        await ends(put)

    async with serving(waits_and_breaks) as (coordinator, address):
        await generate(address, False)
    assert coordinator.streams == 2
