"""Distance between two processes: a TCP forwarder that delivers every byte a stated time after it came.

The delay is one way and the same both ways, so a round trip pays it twice. Bytes wait beside each
other, not in turn: throughput is not limited. A connection's set-up is not delayed, its end is. To the
stated time comes what the forwarder itself takes, which `paceline_lab.bench.simulated.echo` measures through it.

It runs in a process of its own (`DelayProxy`) on uvloop. uvloop counts milliseconds, and so do asyncio's
own timers where they wait by epoll; a delay of 1 ms needs finer ones, so deadlines are kept by a timerfd
(Linux).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

import uvloop

from paceline_lab.bench.worker_process import WorkerProcess, say

_TFD_NONBLOCK = 0o4000
_TFD_ABSTIME = 1


class DelayProxy(WorkerProcess):
    """A forwarder, in a process of its own."""

    @classmethod
    def to(cls, upstream: str, one_way_ms: float = 0.0) -> DelayProxy:
        """Return a forwarder to host:port."""
        return cls.of_module(
            "paceline_lab.bench.simulated.delay", "--upstream", upstream, "--one-way-ms", str(one_way_ms)
        )

    @property
    def address(self) -> str:
        """Return the host:port that leads to the upstream."""
        return self.facts["address"]

    def set_one_way_ms(self, one_way_ms: float) -> None:
        """Delay what comes from now on by so much; standing connections go on."""
        self.ask({"one_way_ms": one_way_ms})


class Deadlines:
    """Runs calls in the order in which they came, each no earlier than its delay later.

    A call that has a shorter delay than those before it waits for them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        self.delay_s = delay_s
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = loop
        loop.add_reader(self._timer, self._run_due)

    def close(self) -> None:
        """Run nothing more."""
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    def later(self, call: Callable[[], None]) -> None:
        """Run a call after the delay; at once where there is none and nothing waits."""
        if not self.delay_s and not self._queue:
            call()
            return
        self._queue.append((time.monotonic_ns() + round(self.delay_s * 1e9), call))
        if len(self._queue) == 1:
            self._arm()

    def _run_due(self) -> None:
        os.read(self._timer, 8)
        while self._queue and self._queue[0][0] <= time.monotonic_ns():
            self._queue.popleft()[1]()
        if self._queue:
            self._arm()

    def _arm(self) -> None:
        seconds, nanoseconds = divmod(self._queue[0][0], 10**9)
        spec = (ctypes.c_long * 4)(0, 0, seconds, nanoseconds)  # itimerspec: no interval, then the time
        if self._libc.timerfd_settime(self._timer, _TFD_ABSTIME, spec, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")


class _Side(asyncio.Protocol):
    """One connection of a forwarded pair; when it ends, the other one ends behind all that it had sent.

    `other` is None until the upstream stands; bytes that come before then are forwarded then.
    """

    transport: asyncio.Transport
    other: _Side | None = None

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            self._deadlines.later(partial(self.other.deliver, data))

    def deliver(self, data: bytes) -> None:
        """Write what has come all the way, if anybody is still there."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self._deadlines.later(self.other.transport.close)

    def join(self, other: _Side) -> None:
        """Forward to each other from now on."""
        for side, its_other in ((self, other), (other, self)):
            side.other = its_other
            early, side._early = side._early, []
            for data in early:
                side.data_received(data)
            if side.transport.is_closing():
                side.connection_lost(None)


class _Accepted(_Side):
    """The side that a client connected."""

    def __init__(self, deadlines: Deadlines, host: str, port: int) -> None:
        super().__init__(deadlines)
        self._upstream = host, port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, other = await loop.create_connection(lambda: _Side(self._deadlines), *self._upstream)
        except OSError:
            self.transport.close()
        else:
            self.join(other)


async def forward(host: str, port: int, one_way_ms: float) -> None:
    """Forward until stdin closes; each line on it has a new delay."""
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop, one_way_ms / 1e3)
    server = await loop.create_server(lambda: _Accepted(deadlines, host, port), "127.0.0.1", 0)
    bound_host, bound_port = server.sockets[0].getsockname()[:2]
    say({"ready": {"address": f"{bound_host}:{bound_port}"}})
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().strip():
        deadlines.delay_s = json.loads(line)["one_way_ms"] / 1e3
        say({})


def main() -> None:
    """Print the address, then forward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", required=True, help="host:port.")
    parser.add_argument("--one-way-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    host, _, port = arguments.upstream.rpartition(":")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(forward(host, int(port), arguments.one_way_ms))


if __name__ == "__main__":
    main()
