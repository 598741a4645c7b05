"""Requests that come before a service has loaded: they are told who loads what, or wait for it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

import coordinator.__main__ as coordinator
from paceline.client import AsyncClient, Client, ModelDescription, PacelineError, PeerUnavailable
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol import codec
from paceline.protocol.handshake import Fingerprint
from paceline.rpc.server import LOADING_RETRY_MS, RunningServer, run_server
from paceline.runtime.config import CoordinatorConfig, PoolSettings, ServerSettings
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc
from tests.e2e.cluster import free_port
from tests.rpc.harness import background, until

MODEL = "table:vocab=64"
NAME = "paceline.v1.GenerationService"


class Loads:
    """A service that loads until it is told that it has; `links_in` descriptions later its target is linked."""

    def __init__(self, links_in: int = 0) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.loaded = asyncio.Event()
        self.links_in = links_in
        self.running: list[RunningServer] = []

    async def register(self, server: grpc.aio.Server) -> None:
        await self.loaded.wait()
        pb_grpc.add_GenerationServiceServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Any) -> None:
        raise AssertionError("asked for descriptions alone")

    async def DescribeModels(self, request: Any, context: Any) -> pb.DescribeModelsResponse:
        self.links_in -= 1
        nobody = Fingerprint()
        description = ModelDescription("m", nobody, nobody, 8, ("auto",), self.links_in < 0, draft_ready=False)
        return pb.DescribeModelsResponse(models=[codec.encode_model_description(description)])


@asynccontextmanager
async def loading(service: Loads, what: str) -> AsyncIterator[Loads]:
    stop = asyncio.Event()
    settings = ServerSettings(port=service.port, drain_seconds=0)
    task = asyncio.create_task(
        run_server(settings, service.register, [NAME], stop, on_serving=service.running.append, loading=what)
    )
    try:
        yield service
    finally:
        stop.set()
        await task


@asynccontextmanager
async def coordinating(target: str, **settings: Any) -> AsyncIterator[str]:
    """A coordinator on a free port, linked to `target` or trying to be."""
    port = free_port()
    config = CoordinatorConfig(
        model=MODEL,
        target=PoolSettings(address=(target,)),
        server=ServerSettings(port=port, drain_seconds=0),
        **settings,
    )
    async with background(coordinator.serve(config)):
        yield f"127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def _collectable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services freeze what they have loaded; tests go on."""
    monkeypatch.setattr(coordinator, "keep_loaded", lambda: None)


async def refusal(address: str, **options: Any) -> PacelineError:
    async with AsyncClient(address, resume_wait_s=0, **options) as client:
        with pytest.raises(PacelineError) as caught:
            await client.generate(token_ids=(1, 2), max_new_tokens=4)
    return caught.value


async def test_a_loading_service_says_what_for_how_long_and_when_to_try_again() -> None:
    async with loading(Loads(), "the target service is still loading m") as service:
        await until(lambda: _listens(service.port))
        error = await refusal(service.address)
    assert isinstance(error, PeerUnavailable)
    assert error.retry_safe
    assert error.retry_after_ms == LOADING_RETRY_MS
    assert error.message == "the target service is still loading m (0 s so far); trying again is safe"
    assert error.metadata["loading"] == "the target service is still loading m"


async def test_a_coordinator_answers_while_it_loads_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def slowly(model: str) -> Any:
        released.wait(20)
        return load_tokenizer(model)

    monkeypatch.setattr(coordinator, "load_tokenizer", slowly)
    try:
        async with coordinating(f"127.0.0.1:{free_port()}") as address:
            await until(lambda: _listens(int(address.rpartition(":")[2])))
            error = await refusal(address)
    finally:
        released.set()
    assert isinstance(error, PeerUnavailable)
    assert f"the coordinator is still loading the tokenizer of {MODEL}" in error.message


async def test_a_request_before_the_targets_link_is_told_that_the_target_loads() -> None:
    async with (
        loading(Loads(), f"the target service is still loading {MODEL}") as target,
        coordinating(target.address, target_wait_ms=300) as address,
    ):
        await _serves(address)
        error = await refusal(address)
    assert isinstance(error, PeerUnavailable)
    assert f"no link to target at {target.address}" in error.message
    assert f"the target service is still loading {MODEL} (" in error.message
    assert error.retry_after_ms == LOADING_RETRY_MS


async def test_a_deadline_is_not_waited_out_without_a_word() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    async with coordinating(nobody, target_wait_ms=30_000) as address:
        await _serves(address)
        began = time.monotonic()
        error = await refusal(address, timeout_s=2.0)
    assert time.monotonic() - began < 2.0
    assert isinstance(error, PeerUnavailable)
    assert f"no link to target at {nobody}" in error.message


@pytest.mark.parametrize("threads", [pytest.param(False, marks=pytest.mark.full), True])
async def test_a_client_waits_until_the_service_and_its_target_are_ready(threads: bool) -> None:
    service = Loads(links_in=1)
    asking = asyncio.create_task(_described(service.address, threads, wait_ready=20))
    await asyncio.sleep(0.3)  # nobody listens yet
    async with loading(service, "the coordinator is still loading"):
        await asyncio.sleep(0.3)
        assert not asking.done()
        service.loaded.set()
        (model,) = await asking
    assert model.target_ready
    assert service.links_in < 0


@pytest.mark.parametrize("threads", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_a_client_that_has_waited_long_enough_says_for_what(threads: bool) -> None:
    service = Loads(links_in=10_000)
    async with loading(service, "the coordinator is still loading m"):
        with pytest.raises(PeerUnavailable, match="still loading m"):
            await _described(service.address, threads, wait_ready=0.5)
        service.loaded.set()
        await until(lambda: service.running)
        with pytest.raises(PeerUnavailable, match=r"no link to its target yet"):
            await _described(service.address, threads, wait_ready=0.5)


async def _described(address: str, threads: bool, *, wait_ready: float) -> tuple[ModelDescription, ...]:
    if threads:
        with Client(address, wait_ready=wait_ready) as client:
            return await asyncio.to_thread(client.describe_models)
    async with AsyncClient(address, wait_ready=wait_ready) as patient:
        return await patient.describe_models()


async def _serves(address: str) -> None:
    """Return once the coordinator has loaded; its target may be anywhere."""
    async with AsyncClient(address) as client, asyncio.timeout(20):
        while True:
            with suppress(PeerUnavailable):
                await client.describe_models()
                return
            await asyncio.sleep(0.05)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
