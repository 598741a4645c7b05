"""Clients that go away, and clients that read slowly."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from paceline_gateway.http.answers import EventStream
from tests.e2e.cluster import eventually
from tests.gateway.gateways import LONG, GatewayCluster, streaming
from tests.gateway.test_connections import LAST, POST, SlowApp, served

ENDLESS: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True, "seed": 1}
CHAT = ("/v1/chat/completions", ENDLESS | {"messages": [{"role": "user", "content": "a"}]})
COMPLETION = ("/v1/completions", ENDLESS | {"prompt": "a"})
SAMPLES = ("/v1/completions", ENDLESS | {"prompt": ["a", "b"], "n": 2})
GONE_WITHIN_S = 2.0
"""The bound is the running step and 100 ms; a shared machine gets more. The text itself takes over ten seconds."""
STALLS_WITHIN_S = 90.0
"""Alone it takes some seconds; beside other work, thousands of steps and their log-probabilities take long."""
PIECE_BYTES = 1 << 16
STANDS_S = 1.0
"""A step takes 1 ms alone; on a busy machine the target gets a turn within this."""


def sessions(gateway: GatewayCluster) -> int:
    return gateway.status("target").sessions


@pytest.mark.parametrize(("path", "body", "count"), [(*CHAT, 1), (*COMPLETION, 1), (*SAMPLES, 4)])
def test_a_client_that_disconnects_frees_its_sessions(
    gateway: GatewayCluster, path: str, body: dict[str, Any], count: int
) -> None:
    with streaming(gateway.address_of("gateway"), path, body):
        eventually(lambda: sessions(gateway) == count, f"{count} sessions run")
    eventually(lambda: sessions(gateway) == 0, "no session runs", GONE_WITHIN_S)
    eventually(lambda: gateway.get("/load").json["server_load"] == 0, "no request runs")


@pytest.mark.full
def test_a_slow_reader_holds_little_and_delays_nobody(gateway: GatewayCluster) -> None:
    process = psutil.Process(gateway.processes["gateway"].pid)
    path, body = CHAT
    body = body | {"logprobs": True, "top_logprobs": 20, "n": 8, "max_tokens": 850}  # 10 MB; the sockets hold 4
    short = {"prompt": "a", "max_tokens": 20, "seed": 1}
    alone = _fastest_s(gateway, short)
    before = process.memory_info().rss
    steps = gateway.status("target").steps
    with streaming(gateway.address_of("gateway"), path, body, receive_buffer=4096):
        eventually(lambda: gateway.status("target").steps > steps, "it runs", STALLS_WITHIN_S)
        eventually(lambda: _stalls(gateway), "nothing more is made, since nobody reads", STALLS_WITHIN_S)
        assert gateway.get("/load").json == {"server_load": 1}, "the response waits for its reader"
        beside = _fastest_s(gateway, short)
        assert process.memory_info().rss - before < 24 << 20
    assert beside < alone + 0.5
    eventually(lambda: sessions(gateway) == 0, "no session runs", GONE_WITHIN_S)
    eventually(lambda: gateway.get("/load").json["server_load"] == 0, "no request runs")


@contextmanager
def taking_nothing(port: int, sent: bytes) -> Iterator[socket.socket]:
    """A connection whose answer has begun, and whose reader takes nothing of it."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(sent)
        eventually(lambda: select.select([connection], [], [], 0)[0] != [], "the answer is written")
        yield connection


def test_events_are_made_as_far_as_sockets_take_them() -> None:
    """What a whole gateway does then, the test above says in `make test-full`."""
    made = 0

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal made
        try:
            while True:
                made += 1
                yield bytes(PIECE_BYTES)
                await asyncio.sleep(0)
        finally:
            made = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await EventStream(events(), reader_timeout_s=60)(scope, receive, send)

    def stands() -> bool:
        before = made
        time.sleep(0.1)
        return before == made

    with served(app) as port:
        with taking_nothing(port, LAST):
            eventually(stands, "nothing more is made, since nobody reads")
            assert 0 < made * PIECE_BYTES < 24 << 20
        eventually(lambda: made == 0, "it ends with its reader")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system drops no connection for us")
def test_a_reader_that_takes_nothing_of_a_whole_answer_loses_its_connection() -> None:
    """The answer is written at once: only the system knows that nobody takes it."""

    def connections() -> int:
        every = psutil.Process().net_connections("tcp")
        return sum(each.laddr.port == port and bool(each.raddr) for each in every)

    body = bytes(16 << 20)
    with (
        served(SlowApp(), reader_timeout_s=0.5) as port,
        taking_nothing(port, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body),
    ):
        assert connections() == 1
        eventually(lambda: connections() == 0, "its connection is dropped")


def _stalls(gateway: GatewayCluster) -> bool:
    """Whether the target makes no step: windows and sockets hold the whole text, or its rounds pause."""
    steps = gateway.status("target").steps
    time.sleep(STANDS_S)
    return gateway.status("target").steps == steps


def _fastest_s(gateway: GatewayCluster, body: dict[str, Any]) -> float:
    took = []
    for _ in range(5):
        began = time.monotonic()
        assert gateway.post("/v1/completions", body).status == 200
        took.append(time.monotonic() - began)
    return min(took)
