from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.local.certificates import Authority
from paceline.protocol.errors import InvalidInput, Overloaded, PacelineError, PeerUnavailable
from paceline.rpc.channel import open_channel, open_sync_channel
from paceline.rpc.link_kinds import DRAFT
from paceline.rpc.peer_link import TargetLink
from paceline.rpc.server import MAX_CALLS, RunningServer, run_server
from paceline.rpc.servicer import serve_link
from paceline.rpc.statuses import typed_errors
from paceline.runtime.config import PeerSettings, ServerSettings
from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import draft_service_pb2_grpc as draft_grpc
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import generation_service_pb2_grpc as generation_grpc
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from tests.e2e.cluster import free_port
from tests.rpc.harness import HELLO, WELCOME, Client, Servicer, error_of, hello_frame, until

NAME = "paceline.v1.TargetService"
ROOT = Path(__file__).resolve().parents[2]
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
BURST = 1600
"""More calls than gRPC lets wait by itself: of those beyond 1,000 it would cancel some."""
NO_MESSAGE = b"\xff\xff\xff"


class Service:
    """A server in the background; `loading` holds it back until it is set."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        on_drain: Callable[[], Awaitable[None]] | None = None,
        servicer: Servicer | None = None,
        register: Callable[[grpc.aio.Server], None] | None = None,
        most_calls: int = MAX_CALLS,
    ) -> None:
        self.servicer = servicer or Servicer()
        self.loading, self.stop = asyncio.Event(), asyncio.Event()
        self.running: list[RunningServer] = []

        async def load(server: grpc.aio.Server) -> None:
            await self.loading.wait()
            if register is None:
                pb_grpc.add_TargetServiceServicer_to_server(self.servicer, server)
            else:
                register(server)

        serving = run_server(settings, load, [NAME], self.stop, on_drain, self.running.append, most_calls=most_calls)
        self.task = asyncio.create_task(serving)

    @property
    def port(self) -> int:
        return self.running[0].port

    def channel(self) -> grpc.aio.Channel:
        return channel_to(self.port)


@asynccontextmanager
async def service(settings: ServerSettings | None = None, **options: Any) -> AsyncIterator[Service]:
    """One that has loaded."""
    running = Service(settings or ServerSettings(), **options)
    running.loading.set()
    try:
        await until(lambda: running.running or running.task.done())
        yield running
    finally:
        running.stop.set()
        await running.task


def channel_to(port: int) -> grpc.aio.Channel:
    return open_channel(PeerSettings(address=f"127.0.0.1:{port}"))


async def health_of(port: int, name: str = NAME) -> int:
    async with channel_to(port) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True, timeout=10)
        return int(answer.status)


async def _status_error(port: int) -> PacelineError:
    async with channel_to(port) as channel:
        stub: Any = pb_grpc.TargetServiceStub(channel)
        return await error_of(stub.GetTargetStatus(pb.GetTargetStatusRequest(), wait_for_ready=True, timeout=10))


async def test_health_follows_the_service_from_loading_to_the_end(tmp_path: Path) -> None:
    port, probe, port_file = free_port(), free_port(), tmp_path / "port"
    settings = ServerSettings(port=port, health_port=probe, port_file=port_file, drain_seconds=5)
    drained = asyncio.Event()

    async def drain() -> None:
        await drained.wait()

    service = Service(settings, on_drain=drain)
    assert await health_of(port) == await health_of(probe) == NOT_SERVING
    error = await _status_error(port)
    assert isinstance(error, PeerUnavailable)
    assert "loading" in error.message
    assert not port_file.exists()
    service.loading.set()
    await until(lambda: service.running)
    assert await health_of(port) == await health_of(probe) == await health_of(port, "") == SERVING
    assert port_file.read_text() == f"127.0.0.1:{port}"
    assert service.running == [RunningServer(port, probe)]
    # A drain lasts while a call is open.
    async with Client(port) as client:
        await client.link.wait_up(10)
        service.stop.set()
        async with asyncio.timeout(10):
            while await health_of(probe) == SERVING:
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
    async with service() as first:
        port = first.port
        with pytest.raises(InvalidInput, match=rf"server address = '127.0.0.1:{port}'"):
            await run_server(ServerSettings(port=port), lambda server: None, [NAME])
        assert await health_of(port) == SERVING


async def test_reflection_lists_the_services() -> None:
    async with service() as running, running.channel() as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([question]), timeout=10)
        answer = await call.read()
        call.cancel()
    names = {entry.name for entry in answer.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names


async def test_link_works_through_the_real_server_and_stop_does_not_wait_for_idle_links() -> None:
    async def nothing_left() -> None:
        """No session is open, so there is nothing to wait for."""

    async with service(ServerSettings(drain_seconds=60), on_drain=nothing_left) as running:
        async with Client(running.port) as client:
            await client.link.wait_up(10)
            await client.is_served()
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
    async with service(servicer=Full()) as running, running.channel() as channel:
        stub: Any = pb_grpc.TargetServiceStub(channel)
        # No call is accepted on this loop while they are made: gRPC's threads take all of them in.
        calls = [stub.GetTargetStatus(pb.GetTargetStatusRequest(), timeout=60) for _ in range(BURST)]
        errors = [await error_of(call) for call in calls]
    assert Counter((type(error), error.retry_after_ms) for error in errors) == {(Overloaded, 500): BURST}


class Drafts(draft_grpc.DraftServiceServicer):
    """Serves links that nothing is sent on."""

    async def Draft(self, request_iterator: Any, context: Any) -> None:
        def refuse(writer: Any) -> Any:
            raise AssertionError("no link is made")

        await serve_link(DRAFT, context, WELCOME, refuse)


def register_all(server: grpc.aio.Server) -> None:
    pb_grpc.add_TargetServiceServicer_to_server(Servicer(), server)
    draft_grpc.add_DraftServiceServicer_to_server(Drafts(), server)
    generation_grpc.add_GenerationServiceServicer_to_server(generation_grpc.GenerationServiceServicer(), server)


def call_without_a_message(channel: grpc.aio.Channel, method: Any) -> Any:
    kinds = {(False, False): "unary_unary", (False, True): "unary_stream", (True, True): "stream_stream"}
    kind = getattr(channel, kinds[method.client_streaming, method.server_streaming])
    call = kind(f"/{method.containing_service.full_name}/{method.name}")
    return call(iter([NO_MESSAGE]) if method.client_streaming else NO_MESSAGE, timeout=20)


METHODS = [
    method
    for file, service in (
        (pb, "TargetService"),
        (draft_pb, "DraftService"),
        (generation_pb, "GenerationService"),
        (health_pb2, "Health"),
    )
    for method in file.DESCRIPTOR.services_by_name[service].methods
]
"""Every method of our servers but reflection's."""


async def test_bytes_that_are_no_message_are_refused_and_the_next_request_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with service(register=register_all) as running, running.channel() as channel:
        for method in METHODS:
            call = call_without_a_message(channel, method)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, method.full_name
            assert "request = '3 bytes': must be a message of its method" in await call.details()
            assert method.input_type.full_name in await call.details()
        assert await health_of(running.port) == SERVING
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_bytes_that_are_no_message_end_their_link_and_no_other() -> None:
    async with service() as running, Client(running.port) as client, running.channel() as channel:
        await client.link.wait_up(10)
        call: Any = channel.stream_stream("/paceline.v1.TargetService/Verify")()
        await call.write(hello_frame().SerializeToString())
        await call.read()
        await call.write(NO_MESSAGE)
        assert isinstance(await error_of(call.read()), InvalidInput)
        assert running.servicer.handlers[1].closed_count == 1
        await client.is_served()


TLS_CASES = [
    ("tls_certificate", "absent.pem", "a readable PEM file (No such file or directory)"),
    ("tls_certificate", "key.pem", "a file with a PEM certificate"),
    ("tls_client_ca", "text.pem", "a file with a PEM certificate"),
    ("tls_key", "text.pem", "a file with an unencrypted PEM private key"),
    ("tls_key", "locked.pem", "a file with an unencrypted PEM private key"),
    ("tls_key", "other.pem", "the private key of server.tls_certificate = "),
    ("tls_key", "rsa.pem", "the private key of server.tls_certificate = "),
]


@pytest.mark.parametrize(("field", "file", "limit"), TLS_CASES)
async def test_a_wrong_tls_file_is_named_with_its_fault(tls_files: Path, field: str, file: str, limit: str) -> None:
    right = {"tls_certificate": "cert.pem", "tls_key": "key.pem", "tls_client_ca": "cert.pem"}
    settings = ServerSettings.model_validate(
        {name: tls_files / each for name, each in (right | {field: file}).items()}
    )
    with pytest.raises(InvalidInput) as caught:
        await run_server(settings, lambda server: None, [NAME])
    assert caught.value.message.startswith(f"server.{field} = {str(tls_files / file)!r}: must be {limit}")


@pytest.mark.parametrize(("field", "file"), [("tls_ca", "text.pem"), ("tls_key", "other.pem")])
async def test_a_wrong_tls_file_of_a_client_is_named(tls_files: Path, field: str, file: str) -> None:
    right = {"tls_ca": "cert.pem", "tls_certificate": "cert.pem", "tls_key": "key.pem"}
    files = {name: tls_files / each for name, each in (right | {field: file}).items()}
    settings = PeerSettings.model_validate({"address": "127.0.0.1:1", **files})
    named = f"{field} = {str(tls_files / file)!r}: must be "
    with pytest.raises(InvalidInput) as caught:
        open_sync_channel(settings)
    assert caught.value.message.startswith(named)
    link = TargetLink(settings, HELLO)
    await link.start()
    await until(lambda: link.last_error)
    await link.close()
    with pytest.raises(PeerUnavailable, match=re.escape(f"target.{named}")):
        await link.wait_up(0)


def test_a_client_takes_its_certificate_with_its_key_and_the_authority() -> None:
    with pytest.raises(InvalidInput, match=r"tls_certificate, tls_key = .*: must be set together"):
        open_sync_channel(PeerSettings(address="127.0.0.1:1", tls_key=Path("key.pem")))


@pytest.mark.parametrize(
    ("field", "words"),
    [("tls_certificate", "set together"), ("tls_client_ca", "must be set together with server.tls_certificate")],
)
async def test_half_of_what_a_server_needs_is_refused(tls_files: Path, field: str, words: str) -> None:
    settings = ServerSettings.model_validate({field: tls_files / "cert.pem"})
    with pytest.raises(InvalidInput, match=rf"{field}.* = .*: .*{words}"):
        await run_server(settings, lambda server: None, [NAME])


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, keys that are not its own, and files that are neither key nor certificate."""
    folder = tmp_path_factory.mktemp("tls")
    own = Authority.create().own
    locked = serialization.BestAvailableEncryption(b"secret")
    keys: dict[str, tuple[Any, Any]] = {
        "other.pem": (Authority.create().key, serialization.NoEncryption()),
        "rsa.pem": (rsa.generate_private_key(65537, 1024), serialization.NoEncryption()),
        "locked.pem": (serialization.load_pem_private_key(own.key, None), locked),
    }
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    contents = {name: key.private_bytes(*form, encryption) for name, (key, encryption) in keys.items()}
    contents |= {"cert.pem": own.certificate, "key.pem": own.key, "text.pem": b"no PEM\n"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


async def test_calls_beyond_the_most_are_refused_as_overload_until_one_ends() -> None:
    async with service(most_calls=2) as running, Client(running.port) as first, Client(running.port) as second:
        await first.link.wait_up(10)
        await second.link.wait_up(10)
        assert isinstance(await _status_error(running.port), Overloaded)
        await first.link.close()
        await until(lambda: running.servicer.ended == 1)
        error = await _status_error(running.port)
        assert not isinstance(error, Overloaded), "it is asked, and has no such method"
