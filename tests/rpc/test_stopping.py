"""How a server's process ends: drained by one signal, at once by two, and with the process that started it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.rpc.channel import open_channel
from paceline.runtime.config import PeerSettings
from tests.rpc.harness import until
from tests.rpc.test_server import ROOT

PROGRAM = """
import asyncio, pathlib, sys
from paceline.rpc.server import run_server
from paceline.runtime.config import ServerSettings

async def drain():
    while not pathlib.Path(sys.argv[2]).exists():
        await asyncio.sleep(0.01)

settings = ServerSettings(port_file=pathlib.Path(sys.argv[1]), drain_seconds=60, stop_with_stdin=sys.argv[3] == "1")
asyncio.run(run_server(settings, lambda server: None, [], on_drain=drain))
"""
"""It drains until a file is there."""
AT_ONCE_S = 1.0
ENDS_S = 20.0
UNMOVED_S = 0.5
"""A server that stops with its starter says so within milliseconds."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Serving:
    """A server as a process of its own, and a call that it has: its drain would be over at once without one."""

    process: subprocess.Popen[bytes]
    port_file: Path
    drained: Path
    watch: Any = None

    async def becomes(self, status: int) -> None:
        """Wait for what health says next."""
        assert (await self.watch.read()).status == status

    async def drains_and_ends(self) -> None:
        await self.becomes(NOT_SERVING)
        self.drained.touch()
        assert await self.exit_code() == 0
        assert not self.port_file.exists()

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, ENDS_S)

    def lose_starter(self) -> None:
        """What the kernel does to the pipe when the process at its other end is gone."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def started(folder: Path, stops_with_stdin: bool, under: Sequence[str]) -> Serving:
    port_file, drained, quiet = folder / "port", folder / "drained", subprocess.DEVNULL
    command = [*under, sys.executable, "-c", PROGRAM, str(port_file), str(drained), str(int(stops_with_stdin))]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    return Serving(process, port_file, drained)


@asynccontextmanager
async def serving(
    folder: Path, *, stops_with_stdin: bool = False, under: Sequence[str] = ()
) -> AsyncIterator[Serving]:
    server = started(folder, stops_with_stdin, under)
    try:
        await until(server.port_file.exists)
        async with open_channel(PeerSettings(address=server.port_file.read_text())) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            server.watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=2 * ENDS_S)
            await server.becomes(SERVING)
            yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture(autouse=True)
def hang_ups_end_what_is_started() -> Iterator[None]:
    """Also where the suite itself was started to outlive its terminal: children inherit what is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def test_one_signal_drains_and_standard_input_means_nothing_by_itself(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        server.lose_starter()
        drains = asyncio.create_task(server.drains_and_ends())
        await asyncio.sleep(UNMOVED_S)
        assert not server.drained.exists()
        server.process.send_signal(signal.SIGINT)
        await drains


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        server.process.send_signal(signal.SIGHUP)
        await server.becomes(NOT_SERVING)
        sent = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 128 + signal.SIGTERM
        assert time.monotonic() - sent < AT_ONCE_S


async def test_a_hang_up_that_nohup_ignores_is_no_first_signal(tmp_path: Path) -> None:
    async with serving(tmp_path, under=["nohup"]) as server:
        server.process.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGTERM)
        await server.drains_and_ends()


async def test_a_server_whose_starter_is_gone_drains_and_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, stops_with_stdin=True) as server:
        server.lose_starter()
        await server.drains_and_ends()
