from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.config import PeerSettings, ServerSettings
from paceline.errors import InvalidInput, Overloaded, PacelineError, PeerUnavailable
from paceline.rpc.channel import open_channel
from paceline.rpc.errors import from_rpc_error, typed_errors
from paceline.rpc.server import RunningServer, address_of, run_server
from paceline.types import TargetOpened
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from tests.rpc.harness import Client, Servicer, an_open, until

NAME = "paceline.v1.TargetService"
ROOT = Path(__file__).resolve().parents[2]
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
BURST = 4000
"""More calls than gRPC lets wait by itself: 1,000, and 3,000 at the very most."""


class Service:
    """A server in the background; `loading` holds it back until it is set."""

    def __init__(
        self,
        settings: ServerSettings,
        on_drain: Callable[[], Awaitable[None]] | None = None,
        servicer: Servicer | None = None,
    ) -> None:
        self.servicer = servicer or Servicer()
        self.loading = asyncio.Event()
        self.stop = asyncio.Event()
        self.running: list[RunningServer] = []
        self.task = asyncio.create_task(
            run_server(settings, self._register, [NAME], self.stop, on_drain, self.running.append)
        )

    async def _register(self, server: grpc.aio.Server) -> None:
        await self.loading.wait()
        pb_grpc.add_TargetServiceServicer_to_server(self.servicer, server)


@asynccontextmanager
async def service(
    settings: ServerSettings,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    servicer: Servicer | None = None,
) -> AsyncIterator[Service]:
    running = Service(settings, on_drain, servicer)
    running.loading.set()
    try:
        await until(lambda: running.running or running.task.done())
        yield running
    finally:
        running.stop.set()
        await running.task


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _health(port: int, name: str = NAME) -> int:
    async with open_channel(PeerSettings(address=f"127.0.0.1:{port}")) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True, timeout=10)
        return int(answer.status)


async def _status_error(port: int) -> PacelineError:
    async with open_channel(PeerSettings(address=f"127.0.0.1:{port}")) as channel:
        stub: Any = pb_grpc.TargetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTargetStatus(pb.GetTargetStatusRequest(), wait_for_ready=True, timeout=10)
    return from_rpc_error(caught.value)


async def test_health_follows_the_service_from_loading_to_the_end(tmp_path: Path) -> None:
    port, probe, port_file = _free_port(), _free_port(), tmp_path / "port"
    settings = ServerSettings(port=port, health_port=probe, port_file=port_file, drain_seconds=5)
    drained = asyncio.Event()

    async def drain() -> None:
        await drained.wait()

    service = Service(settings, drain)
    assert await _health(port) == await _health(probe) == NOT_SERVING
    error = await _status_error(port)
    assert isinstance(error, PeerUnavailable)
    assert "loading" in error.message
    assert not port_file.exists()
    service.loading.set()
    await until(lambda: service.running)
    assert await _health(port) == await _health(probe) == await _health(port, "") == SERVING
    assert port_file.read_text() == f"127.0.0.1:{port}"
    assert service.running == [RunningServer(port, probe)]
    # A drain lasts while a call is open.
    async with Client(port) as client:
        await client.link.wait_up(10)
        service.stop.set()
        async with asyncio.timeout(10):
            while await _health(probe) == SERVING:
                assert not service.task.done()
        assert client.link.is_up
        drained.set()
        await service.task
    assert not port_file.exists()


async def test_stop_while_loading_ends_the_server() -> None:
    service = Service(ServerSettings())
    service.stop.set()
    async with asyncio.timeout(10):
        await service.task
    assert not service.running


async def test_failed_loading_is_raised() -> None:
    def register(server: grpc.aio.Server) -> None:
        raise InvalidInput.of("model", "x", "known")

    with pytest.raises(InvalidInput, match="model = 'x'"):
        await run_server(ServerSettings(), register, [NAME])


async def test_busy_port_is_named() -> None:
    async with service(ServerSettings()) as first:
        port = first.running[0].port
        with pytest.raises(InvalidInput, match=rf"server address = '127.0.0.1:{port}'"):
            await run_server(ServerSettings(port=port), lambda server: None, [NAME])
        assert await _health(port) == SERVING


async def test_reflection_lists_the_services() -> None:
    async with service(ServerSettings()) as running:
        async with open_channel(PeerSettings(address=f"127.0.0.1:{running.running[0].port}")) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
            )
            answer = await call.read()
            call.cancel()
        names = {entry.name for entry in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names


async def test_link_works_through_the_real_server_and_stop_does_not_wait_for_idle_links() -> None:
    async def nothing_left() -> None:
        """No session is open, so there is nothing to wait for."""

    async with service(ServerSettings(drain_seconds=60), nothing_left) as running:
        async with Client(running.running[0].port) as client:
            await client.link.wait_up(10)
            client.link.send(an_open(1))
            await until(lambda: client.events == [TargetOpened(1)])
            running.stop.set()
            async with asyncio.timeout(10):
                await running.task
            await until(lambda: client.downs)
            assert len(client.downs) == 1
            assert isinstance(client.downs[0], PeerUnavailable)
        assert running.servicer.handlers[0].closed_count == 1


class Full(Servicer):
    """Has no room for anyone."""

    @typed_errors
    async def GetTargetStatus(self, request: Any, context: Any) -> Any:
        raise Overloaded("full", retry_after_ms=500)


async def test_calls_of_a_burst_are_answered_by_the_service_and_not_shed_by_grpc() -> None:
    async with (
        service(ServerSettings(), servicer=Full()) as running,
        open_channel(PeerSettings(address=f"127.0.0.1:{running.running[0].port}")) as channel,
    ):
        stub: Any = pb_grpc.TargetServiceStub(channel)
        # No call is accepted on this loop while they are made: gRPC's threads take all of them in.
        calls = [stub.GetTargetStatus(pb.GetTargetStatusRequest(), timeout=60) for _ in range(BURST)]
        errors = [await _error_of(call) for call in calls]
    assert Counter((type(error), error.retry_after_ms) for error in errors) == {(Overloaded, 500): BURST}


async def _error_of(call: Any) -> PacelineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_sigterm_drains_and_ends_the_process(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    process = _spawn(port_file)
    try:
        await until(port_file.exists)
        port = int(port_file.read_text().rpartition(":")[2])
        assert await _health(port, "") == SERVING
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert not port_file.exists()
    finally:
        process.kill()
        process.wait()


def _spawn(port_file: Path) -> subprocess.Popen[bytes]:
    program = (
        "import asyncio, pathlib, sys\n"
        "from paceline.config import ServerSettings\n"
        "from paceline.rpc.server import run_server\n"
        "settings = ServerSettings(port_file=pathlib.Path(sys.argv[1]))\n"
        "asyncio.run(run_server(settings, lambda server: None, []))\n"
    )
    return subprocess.Popen([sys.executable, "-c", program, str(port_file)], cwd=ROOT)


def test_addresses_of_ipv6_hosts_have_brackets() -> None:
    assert address_of("::1", 5) == "[::1]:5"
    assert address_of("[::1]", 5) == "[::1]:5"
    assert address_of("localhost", 5) == "localhost:5"


@pytest.mark.parametrize("field", ["tls_certificate", "tls_key"])
async def test_unreadable_tls_file_is_named(field: str, tmp_path: Path) -> None:
    settings = ServerSettings.model_validate({field: tmp_path / "absent.pem"})
    with pytest.raises(InvalidInput, match=field):
        await run_server(settings, lambda server: None, [NAME])


async def test_half_a_key_pair_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("x")
    with pytest.raises(InvalidInput, match="set together"):
        await run_server(ServerSettings(tls_certificate=tmp_path / "cert.pem"), lambda server: None, [NAME])


async def test_tls_link_and_a_plaintext_probe(tmp_path: Path) -> None:
    certificate, key = _self_signed(tmp_path)
    settings = ServerSettings(tls_certificate=certificate, tls_key=key, health_port=0)
    async with service(settings) as running:
        bound = running.running[0]
        assert bound.health_port is not None
        assert await _health(bound.health_port) == SERVING
        from paceline.rpc.link import TargetLink
        from tests.rpc.harness import HELLO, WELCOME

        link = TargetLink(PeerSettings(address=f"localhost:{bound.port}", tls_ca=certificate), HELLO)
        await link.start()
        assert await link.wait_up(10) == WELCOME
        await link.close()


def _self_signed(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    try:
        subprocess.run(
            [*command, "-days", "2", "-keyout", key, "-out", certificate, *subject], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("needs openssl")
    return certificate, key
