"""A coordinator that only describes itself, over gRPC, when it may; and a clock that is set by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from paceline.protocol import codec
from paceline.protocol.errors import Unauthenticated
from paceline.protocol.generation import ModelDescription
from paceline.protocol.handshake import Fingerprint
from paceline.rpc.endpoints import Endpoint
from paceline.rpc.statuses import typed_errors
from paceline.runtime.gateway_config import GatewayConfig
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc
from paceline_gateway.upstream.coordinators import Coordinator
from tests.services.harness import serving

TARGET = Fingerprint("m", "t", 99, "n")
DESCRIPTION = ModelDescription("m", TARGET, TARGET, 99, (), True, True)
WRONG_KEY = "wrong"


class SteppedTime:
    """In the place of a module's `time`; the event loop keeps its own."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class DescribingService(pb_grpc.GenerationServiceServicer):
    """Keeps what came with each question, and answers when it may."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, Any]] = []
        self.may_answer = asyncio.Event()
        self.came = asyncio.Event()

    @property
    def keys(self) -> list[str]:
        """Of the questions, in their order; empty: none."""
        return [str(each.get("authorization", "")).removeprefix("Bearer ") for each in self.metadata]

    @typed_errors
    async def DescribeModels(
        self, request: pb.DescribeModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeModelsResponse:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        key = self.keys[-1]
        self.came.set()
        await self.may_answer.wait()
        if key == WRONG_KEY:
            raise Unauthenticated("no such key")
        return pb.DescribeModelsResponse(models=[codec.encode_model_description(DESCRIPTION)])


@asynccontextmanager
async def describing() -> AsyncIterator[tuple[DescribingService, Coordinator]]:
    """A coordinator, as it serves and as a gateway knows it."""
    service = DescribingService()
    async with serving(lambda server: pb_grpc.add_GenerationServiceServicer_to_server(service, server)) as address:
        coordinator = Coordinator(GatewayConfig(), Endpoint(address), TARGET.tokenizer)
        try:
            yield service, coordinator
        finally:
            await coordinator.close()
