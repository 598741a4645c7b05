"""Peers that answer nothing, or what nobody can read: what those who asked are told, and that they go on."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from paceline.protocol.errors import InvalidInput, PacelineError, PeerUnavailable
from paceline.rpc import peer_link
from paceline.rpc.statuses import DETAILS_KEY, to_status
from tests.rpc.harness import Client, ScriptedServicer, serving, silent_listener, until, welcome_frame


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
