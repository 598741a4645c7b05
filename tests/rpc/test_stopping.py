"""How a server's process ends: drained by one signal, at once by two, and with the process that started it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
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


class Serving:
    """A server as a process of its own, and a call that it has: its drain would be over at once without one."""

    def __init__(self, folder: Path, *, stops_with_stdin: bool, hang_ups_ignored: bool) -> None:
        self.port_file, self.drained = folder / "port", folder / "drained"
        self.watch: Any = None
        arguments = [str(self.port_file), str(self.drained), str(int(stops_with_stdin))]
        nohup = ["nohup"] if hang_ups_ignored else []
        self.process = subprocess.Popen(
            [*nohup, sys.executable, "-c", PROGRAM, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def becomes(self, status: int) -> None:
        """Wait for what health says next."""
        assert (await self.watch.read()).status == status

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, ENDS_S)

    def lose_starter(self) -> None:
        """What the kernel does to the pipe when the process at its other end is gone."""
        assert self.process.stdin is not None
        self.process.stdin.close()


@asynccontextmanager
async def serving(
    folder: Path, *, stops_with_stdin: bool = False, hang_ups_ignored: bool = False
) -> AsyncIterator[Serving]:
    server = Serving(folder, stops_with_stdin=stops_with_stdin, hang_ups_ignored=hang_ups_ignored)
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
        changed = asyncio.create_task(server.becomes(NOT_SERVING))
        await asyncio.sleep(UNMOVED_S)
        assert not changed.done()
        server.process.send_signal(signal.SIGINT)
        await changed
        server.drained.touch()
        assert await server.exit_code() == 0
        assert not server.port_file.exists()


@pytest.mark.parametrize(
    "number",
    [signal.SIGHUP, *(pytest.param(each, marks=pytest.mark.full) for each in (signal.SIGTERM, signal.SIGINT))],
)
async def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    async with serving(tmp_path) as server:
        server.process.send_signal(number)
        await server.becomes(NOT_SERVING)
        sent = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 128 + signal.SIGTERM
        assert time.monotonic() - sent < AT_ONCE_S


async def test_a_hang_up_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    async with serving(tmp_path, hang_ups_ignored=True) as server:
        server.process.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGTERM)
        await server.becomes(NOT_SERVING)
        server.drained.touch()
        assert await server.exit_code() == 0, "the hang-up did not count as a first signal"


async def test_a_server_whose_starter_is_gone_drains_and_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, stops_with_stdin=True) as server:
        server.lose_starter()
        await server.becomes(NOT_SERVING)
        server.drained.touch()
        assert await server.exit_code() == 0
