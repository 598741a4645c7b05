"""A receiver of spans over OTLP, in a process of its own, which reads none of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import uvloop

from paceline.rpc.server import RunningServer, run_server
from paceline.runtime.config import ServerSettings
from paceline_lab.bench.worker_process import WorkerProcess, say

SPANS = "opentelemetry.proto.collector.trace.v1.TraceService"


@contextmanager
def span_sink() -> Iterator[str]:
    """Run the other process while the context is open; yield its address."""
    with WorkerProcess.of_module("paceline_lab.bench.ab.span_sink") as server:
        yield server.facts["address"]


async def _take(_: bytes, context: Any) -> bytes:
    return b""


def _register(server: grpc.aio.Server) -> None:
    spans: Any = grpc.unary_unary_rpc_method_handler(_take)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SPANS, {"Export": spans}),))


def _announce(running: RunningServer) -> None:
    say({"ready": {"address": f"127.0.0.1:{running.port}"}})


async def serve() -> None:
    """Take spans until stdin closes."""
    stop = asyncio.Event()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    waiting = asyncio.ensure_future(reader.read())
    waiting.add_done_callback(lambda _: stop.set())
    await run_server(ServerSettings(drain_seconds=0), _register, [SPANS], stop, on_serving=_announce)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as main_runner:
        main_runner.run(serve())
