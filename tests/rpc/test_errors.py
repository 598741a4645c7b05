"""Errors as statuses, and back; peers that answer nothing, or what nobody can read: those who asked go on."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from paceline.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    Unsupported,
)
from paceline.rpc import peer_link
from paceline.rpc.channel import open_channel, open_sync_channel
from paceline.rpc.statuses import (
    DETAILS_KEY,
    DOMAIN,
    NO_MEMORY_MS,
    from_rpc_error,
    from_status,
    to_status,
    typed_errors,
)
from paceline.runtime.config import PeerSettings
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from tests.rpc.harness import Client, ScriptedServicer, error_of, serving, silent_listener, until, welcome_frame

# Errors that never cross a process boundary are defined elsewhere.
ALL = [kind for kind in PacelineError.__subclasses__() if kind.__module__ == PacelineError.__module__]


@pytest.mark.parametrize("kind", ALL)
def test_status_and_back_keep_every_error(kind: type[PacelineError]) -> None:
    error = kind("it broke: x = 3", metadata={"field": "x", "limit": "in [0, 2]"}, retry_after_ms=1500)
    status = to_status(error)
    assert status.code == int(kind.code)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.domain, info.reason) == (DOMAIN, kind.reason)
    assert retry.retry_delay.ToMilliseconds() == 1500
    again = from_status(status)
    assert again is not None
    assert (type(again), again.message, again.metadata) == (kind, error.message, error.metadata)
    assert again.retry_after_ms == 1500
    assert len(to_status(kind("no hint")).details) == 1


def test_a_strangers_status_is_not_ours() -> None:
    status = to_status(InvalidInput("x"))
    info = error_details_pb2.ErrorInfo(domain="elsewhere", reason="INVALID_INPUT")
    status.details[0].Pack(info)
    assert from_status(status) is None


class Failing(pb_grpc.TargetServiceServicer):
    """Raises what it is told to."""

    error: Exception

    @typed_errors
    async def GetTargetStatus(self, request: pb.GetTargetStatusRequest, context: Any) -> pb.GetTargetStatusResponse:
        raise self.error


async def error_across_a_call(error: Exception) -> PacelineError:
    """What a caller makes of what a method raises."""
    servicer = Failing()
    servicer.error = error
    async with serving(servicer) as port, open_channel(PeerSettings(address=f"127.0.0.1:{port}")) as channel:
        stub: Any = pb_grpc.TargetServiceStub(channel)
        return await error_of(stub.GetTargetStatus(pb.GetTargetStatusRequest()))


async def test_typed_error_crosses_a_call() -> None:
    sent = Overloaded("no room: sessions = 9", metadata={"limit": "8"}, retry_after_ms=20)
    error = await error_across_a_call(sent)
    assert (type(error), error.message, error.retry_after_ms) == (Overloaded, "no room: sessions = 9", 20)
    assert error.metadata == {"limit": "8"}


async def test_long_message_with_every_sign_crosses_a_call() -> None:
    error = await error_across_a_call(InvalidInput("ü" * 5000, metadata={"value": "✓" * 5000}))
    assert isinstance(error, InvalidInput)
    assert error.message == "ü" * len(error.message)


async def test_defect_is_logged_and_sent_as_internal(caplog: pytest.LogCaptureFixture) -> None:
    error = await error_across_a_call(KeyError("secret"))
    assert type(error) is InternalError
    assert "KeyError" in error.message
    assert "secret" not in error.message
    assert "secret" in caplog.text


async def test_want_of_memory_is_logged_and_sent_as_no_room_now(caplog: pytest.LogCaptureFixture) -> None:
    error = await error_across_a_call(MemoryError())
    assert (type(error), error.retry_after_ms) == (Overloaded, NO_MEMORY_MS)
    assert "MemoryError" in caplog.text


def test_absent_peer_is_unavailable_for_threads_too() -> None:
    with open_sync_channel(PeerSettings(address="127.0.0.1:1")) as channel:
        stub: Any = pb_grpc.TargetServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetTargetStatus(pb.GetTargetStatusRequest(), timeout=10)
    error = from_rpc_error(caught.value, "target at 127.0.0.1:1")
    assert isinstance(error, PeerUnavailable)
    assert error.message.startswith("target at 127.0.0.1:1: ")


class Status(grpc.RpcError):
    """A status that gRPC made by itself."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", PeerUnavailable),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", PeerUnavailable),
        (grpc.StatusCode.INTERNAL, "Stream removed (Unwrap failed (TSI_DATA_CORRUPTED))", PeerUnavailable),
        (grpc.StatusCode.UNKNOWN, "Stream removed", PeerUnavailable),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", PeerUnavailable),
        (grpc.StatusCode.INTERNAL, "Exception deserializing response!", InternalError),
        (grpc.StatusCode.CANCELLED, "Locally cancelled by application!", Cancelled),
        (grpc.StatusCode.CANCELLED, "Channel closed!", Cancelled),
        (grpc.StatusCode.CANCELLED, "Stream removed (Channel closed!)", Cancelled),
        (grpc.StatusCode.CANCELLED, "CANCELLED", PeerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", Unsupported),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)", InvalidInput),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "quota", Overloaded),
        (grpc.StatusCode.UNKNOWN, "?", InternalError),
    ],
)
def test_statuses_of_grpc_itself_are_typed(code: grpc.StatusCode, details: str, kind: type[PacelineError]) -> None:
    assert type(from_rpc_error(Status(code, details))) is kind


async def test_a_question_whose_link_ends_meanwhile_has_a_typed_answer() -> None:
    async with silent_listener() as port, Client(port) as client:
        await until(lambda: client.link._channel)
        asked = asyncio.create_task(client.link.status(60))
        await asyncio.sleep(0.05)
        await client.link.close()
        with pytest.raises(PeerUnavailable, match=f"target at 127.0.0.1:{port}"):
            await asked


async def test_who_asked_may_leave() -> None:
    async with silent_listener() as port, Client(port) as client:
        await until(lambda: client.link._channel)
        asked = asyncio.create_task(client.link.status(60))
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


def _damaged_info() -> bytes:
    status = to_status(InvalidInput("x"))
    status.details[0].value = status.details[0].value[:-1]
    return bytes(status.SerializeToString())


MALFORMED = {
    "no status": b"\xff\xff",
    "a damaged ErrorInfo": _damaged_info(),
    "a damaged RetryInfo": status_pb2.Status(
        details=[{"type_url": f"x/{error_details_pb2.RetryInfo.DESCRIPTOR.full_name}", "value": b"\xff"}]
    ).SerializeToString(),
}


def breaking_its_first_link(details: bytes) -> ScriptedServicer:
    """Welcomes, and ends its first link with details that nobody can read."""

    async def script(link: int, context: Any) -> None:
        await context.write(welcome_frame())
        if link == 1:
            metadata = ((DETAILS_KEY, details),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it stops", trailing_metadata=metadata)

    return ScriptedServicer(script)


@pytest.mark.parametrize("details", MALFORMED.values(), ids=MALFORMED)
async def test_a_link_that_ends_with_such_details_is_down_and_comes_back(details: bytes) -> None:
    async with serving(servicer := breaking_its_first_link(details)) as port, Client(port) as client:
        await until(lambda: client.downs and len(client.ups) == 2, 10)
        assert type(client.downs[0]) is PeerUnavailable
        assert servicer.links == 2


async def test_a_link_outlives_a_defect(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def breaks(error: grpc.RpcError, peer: str = "") -> PacelineError:
        raise KeyError("a defect")

    monkeypatch.setattr(peer_link, "from_rpc_error", breaks)
    async with serving(servicer := breaking_its_first_link(b"")) as port, Client(port) as client:
        await until(lambda: client.downs and len(client.ups) == 2, 10)
        assert servicer.links == 2
    assert "link failed: peer=target" in caplog.text
