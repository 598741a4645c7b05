"""What a gateway asks its coordinators about themselves, and how often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from paceline.protocol import codec
from paceline.protocol.errors import Unauthenticated
from paceline.protocol.generation import ModelDescription
from paceline.protocol.handshake import Fingerprint
from paceline.rpc.endpoints import Endpoint
from paceline.rpc.statuses import typed_errors
from paceline.runtime.gateway_config import GatewayConfig
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc
from paceline_gateway.upstream import coordinators
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import DESCRIPTION_FRESH_S, MAX_NEW_KEY_QUERIES, Coordinator

TARGET = Fingerprint("m", "t", 99, "n")
DESCRIPTION = ModelDescription("m", TARGET, TARGET, 99, (), True, True)
WRONG_KEY = "wrong"


class SlowToDescribe(pb_grpc.GenerationServiceServicer):
    """Counts questions, and answers when it may."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.came = asyncio.Event()

    @typed_errors
    async def DescribeModels(
        self, request: pb.DescribeModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeModelsResponse:
        key = str(dict(context.invocation_metadata() or ()).get("authorization", "")).removeprefix("Bearer ")
        self.asked.append(key)
        self.came.set()
        await self.may_answer.wait()
        if key == WRONG_KEY:
            raise Unauthenticated("no such key")
        return pb.DescribeModelsResponse(models=[codec.encode_model_description(DESCRIPTION)])


@asynccontextmanager
async def described_slowly() -> AsyncIterator[tuple[SlowToDescribe, Coordinator]]:
    """A coordinator, as it serves and as a gateway knows it."""
    server, servicer = grpc.aio.server(), SlowToDescribe()
    pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    coordinator = Coordinator(GatewayConfig(), Endpoint(f"127.0.0.1:{port}"), TARGET.tokenizer)
    try:
        yield servicer, coordinator
    finally:
        await coordinator.close()
        await server.stop(None)


def key(text: str) -> HttpCaller:
    return HttpCaller("r", api_key=text)


def set_clock(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    """The coordinators' own; the event loop keeps its."""
    monkeypatch.setattr(coordinators, "time", SimpleNamespace(monotonic=lambda: now))


async def test_requests_that_come_at_once_ask_once_for_each_key() -> None:
    async with described_slowly() as (servicer, coordinator):
        waiting = [asyncio.create_task(coordinator.recent_description(key(text))) for text in "aaabb"]
        await servicer.came.wait()
        servicer.may_answer.set()
        assert await asyncio.gather(*waiting) == [DESCRIPTION] * 5
        assert sorted(servicer.asked) == ["a", "b"]
        assert await coordinator.recent_description(key("a")) == DESCRIPTION
        assert sorted(servicer.asked) == ["a", "b"], "it is known for a while"


async def test_requests_that_follow_each_other_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with described_slowly() as (servicer, coordinator):
        servicer.may_answer.set()
        await coordinator.recent_description(key("a"))
        servicer.may_answer.clear()
        servicer.came.clear()
        now = time.monotonic()
        set_clock(monkeypatch, now + 0.6 * DESCRIPTION_FRESH_S)
        for _ in range(3):
            assert await coordinator.recent_description(key("a")) == DESCRIPTION
        await asyncio.wait_for(servicer.came.wait(), 5)
        assert servicer.asked == ["a", "a"]
        set_clock(monkeypatch, now + 1.1 * DESCRIPTION_FRESH_S)
        waits = asyncio.create_task(coordinator.recent_description(key("a")))
        await asyncio.sleep(0)
        assert not waits.done(), "what is old is not told"
        servicer.may_answer.set()
        assert await waits == DESCRIPTION
        assert servicer.asked == ["a", "a"]


async def test_a_request_that_leaves_takes_no_answer_from_the_others() -> None:
    async with described_slowly() as (servicer, coordinator):
        leaves, stays = (asyncio.create_task(coordinator.recent_description(key("a"))) for _ in range(2))
        await servicer.came.wait()
        leaves.cancel()
        servicer.may_answer.set()
        assert await stays == DESCRIPTION
        with pytest.raises(asyncio.CancelledError):
            await leaves


async def test_a_refusal_is_told_to_all_who_wait_and_is_asked_for_again() -> None:
    async with described_slowly() as (servicer, coordinator):
        servicer.may_answer.set()
        for asked in (1, 2):
            waiting = [coordinator.recent_description(key(WRONG_KEY)) for _ in range(3)]
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(answer) for answer in answers] == [Unauthenticated] * 3
            assert servicer.asked == [WRONG_KEY] * asked


async def test_strangers_wait_for_each_other_and_who_is_known_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with described_slowly() as (servicer, coordinator):
        servicer.may_answer.set()
        await coordinator.recent_description(key("known"))
        servicer.may_answer.clear()
        strangers = [
            asyncio.create_task(coordinator.recent_description(key(f"invented-{number}"))) for number in range(100)
        ]
        while len(servicer.asked) < 1 + MAX_NEW_KEY_QUERIES:
            servicer.came.clear()
            await servicer.came.wait()
        set_clock(monkeypatch, time.monotonic() + DESCRIPTION_FRESH_S)
        again = asyncio.create_task(coordinator.recent_description(key("known")))
        while servicer.asked.count("known") < 2:
            servicer.came.clear()
            await servicer.came.wait()
        assert len(servicer.asked) == 2 + MAX_NEW_KEY_QUERIES
        servicer.may_answer.set()
        assert (await again).target_ready
        await asyncio.gather(*strangers)
        assert len(servicer.asked) == 102
