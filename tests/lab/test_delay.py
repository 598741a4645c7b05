"""The forwarder delays, keeps the order, and ends when a side does."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from paceline.rpc.channel import open_sync_channel
from paceline.runtime.config import PeerSettings
from paceline_lab.bench.simulated.delay import Deadlines, DelayProxy
from paceline_lab.bench.simulated.echo import echo_ms, echo_server

LARGE = bytes(range(256)) * 8192  # 2 MiB: many reads and writes


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        yield server


@pytest.fixture
def proxy(listener: socket.socket) -> Iterator[DelayProxy]:
    with DelayProxy.to(f"127.0.0.1:{listener.getsockname()[1]}") as running:
        yield running


def connect(listener: socket.socket, proxy: DelayProxy) -> tuple[socket.socket, socket.socket]:
    """A connected pair, the client's end first."""
    host, _, port = proxy.address.rpartition(":")
    near = socket.create_connection((host, int(port)), timeout=20)
    far, _ = listener.accept()
    far.settimeout(20)
    return near, far


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    return data


def test_bytes_arrive_in_order_both_ways_at_once(listener: socket.socket, proxy: DelayProxy) -> None:
    near, far = connect(listener, proxy)
    with closing(near), closing(far):
        proxy.set_one_way_ms(2)
        there, back = LARGE, LARGE[::-1]
        senders = [threading.Thread(target=end.sendall, args=(data,)) for end, data in ((near, there), (far, back))]
        received: list[bytes] = []
        reader = threading.Thread(target=lambda: received.append(receive(near, len(back))))
        for thread in (*senders, reader):
            thread.start()
        assert receive(far, len(there)) == there
        for thread in (*senders, reader):
            thread.join(timeout=20)
        assert received == [back]


def test_nothing_arrives_before_its_delay(listener: socket.socket, proxy: DelayProxy) -> None:
    near, far = connect(listener, proxy)
    with closing(near), closing(far):
        for delay_ms, source, sink in ((60, near, far), (30, far, near)):
            proxy.set_one_way_ms(delay_ms)
            begun = time.monotonic()
            source.sendall(b"first")
            assert sink.recv(5) == b"first"
            assert time.monotonic() - begun >= delay_ms / 1e3


async def test_a_shorter_delay_overtakes_nothing() -> None:
    deadlines = Deadlines(asyncio.get_running_loop(), 0.05)
    called: list[str] = []
    over = asyncio.Event()
    begun = time.monotonic()
    deadlines.later(partial(called.append, "slow"))
    deadlines.delay_s = 0.0
    deadlines.later(partial(called.append, "fast"))
    deadlines.later(over.set)
    assert not called
    async with asyncio.timeout(20):
        await over.wait()
    assert time.monotonic() - begun >= 0.05
    deadlines.later(partial(called.append, "at once"))
    assert called == ["slow", "fast", "at once"]
    deadlines.close()


@pytest.mark.parametrize("ends", ["client", "server"])
def test_a_side_that_ends_ends_the_other_behind_what_it_sent(
    listener: socket.socket, proxy: DelayProxy, ends: str
) -> None:
    proxy.set_one_way_ms(20)
    near, far = connect(listener, proxy)
    with closing(near), closing(far):
        source, sink = (near, far) if ends == "client" else (far, near)
        source.sendall(b"last words")
        source.close()
        assert receive(sink, 100) == b"last words"


def test_what_comes_for_a_side_that_has_ended_disturbs_no_other_connection(
    listener: socket.socket, proxy: DelayProxy
) -> None:
    proxy.set_one_way_ms(20)
    near, far = connect(listener, proxy)
    with closing(near), closing(far):
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        far.sendall(b"answer")
        near.close()
        assert far.recv(1) == b""
    near, far = connect(listener, proxy)
    with closing(near), closing(far):
        near.sendall(b"next")
        assert receive(far, 4) == b"next"


def test_a_client_is_cut_off_where_there_is_no_upstream() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with DelayProxy.to(f"127.0.0.1:{port}") as proxy:
        host, _, own = proxy.address.rpartition(":")
        with socket.create_connection((host, int(own)), timeout=20) as near:
            assert near.recv(1) == b""


def test_an_echo_over_grpc_pays_the_delay_twice() -> None:
    with echo_server() as address, DelayProxy.to(address, one_way_ms=15) as proxy:
        assert echo_ms(address, pause_ms=1, messages=5) > 0
        assert echo_ms(proxy.address, pause_ms=1, messages=5) >= 30


def test_spans_are_taken_and_not_read() -> None:
    with echo_server() as address, open_sync_channel(PeerSettings(address=address)) as channel:
        export: Any = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        assert export(b"spans", timeout=20) == b""
