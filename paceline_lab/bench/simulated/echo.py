"""What one message and its answer cost over gRPC when nothing else happens: the floor of coordination.

One aio stream between two processes, uvloop on both sides, the services' own channel and server
settings, 200 bytes each way (a coupled round of k = 8 has fewer than 500). Between messages the client
pauses as long as a verification takes, so both processes sleep when a message comes, as they do in a run.

The same process takes spans over OTLP and reads none, for services that are traced.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import uvloop

from paceline.rpc.channel import open_channel
from paceline.rpc.server import RunningServer, run_server
from paceline.runtime.config import PeerSettings, ServerSettings
from paceline_lab.bench.worker_process import WorkerProcess, say

SERVICE = "paceline.bench.Echo"
METHOD = "Echo"
SPANS = "opentelemetry.proto.collector.trace.v1.TraceService"
PAYLOAD = bytes(200)
MESSAGES = 200
WARM_UP_MESSAGES = 10


@contextmanager
def echo_server() -> Iterator[str]:
    """Run the other process while the context is open; yield its address."""
    with WorkerProcess.of_module("paceline_lab.bench.simulated.echo") as server:
        yield server.facts["address"]


def echo_ms(address: str, pause_ms: float, messages: int = MESSAGES) -> float:
    """Return the median milliseconds from a message's write to its echo's read, idle but for this stream."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return statistics.median(runner.run(_echoes(address, pause_ms, messages))[WARM_UP_MESSAGES:])


async def _echoes(address: str, pause_ms: float, messages: int) -> list[float]:
    times = []
    async with open_channel(PeerSettings(address=address)) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        for _ in range(WARM_UP_MESSAGES + messages):
            start_s = time.perf_counter()
            await call.write(PAYLOAD)
            await call.read()
            times.append((time.perf_counter() - start_s) * 1e3)
            await asyncio.sleep(pause_ms / 1e3)
        await call.done_writing()
    return times


async def _echo(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for message in requests:
        yield message


async def _take(_: bytes, context: Any) -> bytes:
    return b""


def _register(server: grpc.aio.Server) -> None:
    echo: Any = grpc.stream_stream_rpc_method_handler(_echo)
    spans: Any = grpc.unary_unary_rpc_method_handler(_take)
    services = {SERVICE: {METHOD: echo}, SPANS: {"Export": spans}}
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items())
    )


def _announce(running: RunningServer) -> None:
    say({"ready": {"address": f"127.0.0.1:{running.port}"}})


async def serve() -> None:
    """Echo until stdin closes."""
    stop = asyncio.Event()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    waiting = asyncio.ensure_future(reader.read())
    waiting.add_done_callback(lambda _: stop.set())
    await run_server(ServerSettings(drain_seconds=0), _register, [SERVICE], stop, on_serving=_announce)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as main_runner:
        main_runner.run(serve())
