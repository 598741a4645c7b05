"""What HTTP costs beside gRPC: `python -m paceline_lab.bench.http_cost --out docs/reports`.

One simulated pair, one coordinator, and a gateway before it. The same requests run straight to the coordinator, as
events of gRPC, and through the gateway, as streamed completions; gRPC runs twice, and the ratio of the two is the
run's own noise. The ways run in turns, and every second turn runs backwards; a ratio is of one turn.

Both clients live in this process. That of HTTP has its connections before the clock starts and searches what it
receives for its first token and its end: reading more would be no cost of the gateway's.

All processes share the machine's cores, so what bounds the throughput of many clients is the CPU that a token costs
in all of them: the second table has it by process, and the throughput at which it would fill the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from paceline.client import AsyncClient
from paceline.protocol.generation import Finished, SpeculationSettings, Tokens
from paceline.runtime.stopping import signals_interrupt
from paceline_lab import REPORTS
from paceline_lab.bench.simulated.services import OFF, ModelServices, SimulatedPair, drafted, request
from paceline_lab.reporting.figures import Spread, lower_bound
from paceline_lab.reporting.presentation import markdown_table, spread_text, verdict
from paceline_lab.reporting.reports import load_average, write_rows

PAIR = SimulatedPair("distribution=middling", 11.45, 2.0)
"""A step of a large model on a GPU, and one of its draft."""
MODES: Mapping[str, SpeculationSettings] = {"target-only": OFF, "drafts of 4": drafted(4)}
CLIENTS = (1, 64)
TOKENS = 128
BAR = 0.97
TOKEN_MARK = b'"token_ids":['
LAST_CHUNK = b"\r\n0\r\n\r\n"
WAYS = ("grpc", "grpc again", "http")
SERVICES = ("target", "draft", "coordinator", "gateway")
CLIENT = "clients"


@dataclass(frozen=True)
class HttpTurn:
    """One wave: tokens per second of all clients, the median of their first tokens' times, CPU of each process."""

    tokens_per_second: float
    first_token_ms: float
    cpu_ms_a_token: dict[str, float]


@dataclass(frozen=True)
class HttpCostRow:
    """One mode at one number of clients: each way's turns."""

    mode: str
    clients: int
    turns: dict[str, tuple[HttpTurn, ...]]

    def ratios(self, way: str, figure: str) -> list[float]:
        """A way's figure over that of `grpc`, turn by turn."""
        pairs = zip(self.turns[way], self.turns["grpc"], strict=True)
        return [getattr(mine, figure) / getattr(base, figure) for mine, base in pairs]

    def columns(self) -> dict[str, object]:
        """Of the report's table."""
        speeds = self.ratios("http", "tokens_per_second")
        first = {way: Spread.of([each.first_token_ms for each in self.turns[way]]) for way in WAYS}
        return {
            "mode": self.mode,
            "clients": self.clients,
            "turns": len(speeds),
            "gRPC tokens/s": spread_text(Spread.of([each.tokens_per_second for each in self.turns["grpc"]])),
            "HTTP ÷ gRPC": spread_text(Spread.of(speeds), 3),
            "lower bound": f"{lower_bound(speeds):.3f}",
            "gRPC again ÷ gRPC": spread_text(Spread.of(self.ratios("grpc again", "tokens_per_second")), 3),
            f"at least {BAR:g}": verdict(Spread.of(speeds).median, BAR),
            "first token ms: gRPC": spread_text(first["grpc"], 1),
            "HTTP": spread_text(first["http"], 1),
        }

    def costs(self, way: str) -> dict[str, object]:
        """Of the report's table of CPU: means, since the system counts a process's CPU in steps of 10 ms."""
        turns = self.turns[way]
        parts = {name: statistics.fmean(each.cpu_ms_a_token[name] for each in turns) for name in (*SERVICES, CLIENT)}
        total = sum(parts.values())
        return {
            "mode": self.mode,
            "clients": self.clients,
            "way": way,
            **{f"{name} µs": f"{part * 1e3:.0f}" for name, part in parts.items()},
            "together µs a token": f"{total * 1e3:.0f}",
            "ceiling tokens/s": f"{(os.cpu_count() or 1) / total * 1e3:.0f}",
            "measured": f"{statistics.median(each.tokens_per_second for each in turns):.0f}",
        }


class HttpServices(ModelServices):
    """A target, a draft service, a coordinator and a gateway."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, PAIR.target, PAIR.draft)

    def start_all(self) -> None:
        """Start all four."""
        super().start_all()
        peers = {f"{name}.address": self.address_of(name) for name in ("target", "draft")}
        self.start("coordinator", "coordinator", {"model": PAIR.target, "server.port": 0} | peers)
        self.await_serving("coordinator")
        self.await_links()
        reached = {"coordinator.address": self.address_of("coordinator")}
        self.start("gateway", "gateway", {"model": PAIR.target, "server.port": 0} | reached)
        self.await_serving("gateway")

    def cpu_seconds(self) -> dict[str, float]:
        """What each process has used so far, this one as the clients', in user and system mode."""
        used = {name: psutil.Process(self.processes[name].pid).cpu_times() for name in SERVICES}
        return {name: float(each.user + each.system) for name, each in used.items()} | {CLIENT: time.process_time()}


class _Connection(asyncio.Protocol):
    """One connection, and the response that it is receiving."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._first = 0.0
        self._end = LAST_CHUNK
        self._whole: asyncio.Future[bytes] | None = None

    def data_received(self, data: bytes) -> None:
        seen = len(self._received)
        self._received += data
        if not self._first and self._received.find(TOKEN_MARK, max(0, seen - len(TOKEN_MARK))) >= 0:
            self._first = time.perf_counter()
        if self._whole is not None and self._received.endswith(self._end):
            self._whole.set_result(bytes(self._received))

    def connection_lost(self, error: Exception | None) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(ConnectionError(f"closed after {bytes(self._received[-200:])!r}"))

    async def response(self, end: bytes) -> tuple[float, bytes]:
        """Await the next response, which ends so; returns when its first token came, and all of it."""
        self._first, self._end = 0.0, end
        self._received.clear()
        self._whole = asyncio.get_running_loop().create_future()
        whole = await self._whole
        assert whole.startswith(b"HTTP/1.1 200"), whole[:200]
        return self._first, whole


class StreamingClient:
    """Streams completions over connections of its own, one for each request of a wave."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._kept: list[tuple[asyncio.Transport, _Connection]] = []

    async def connect(self, count: int) -> None:
        """Open as many connections in the place of those that were; each has been answered once."""
        for transport, _ in self._kept:
            transport.close()
        loop = asyncio.get_running_loop()
        self._kept = [await loop.create_connection(_Connection, self._host, self._port) for _ in range(count)]
        for transport, connection in self._kept:
            transport.write(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await connection.response(b"\r\n\r\n")

    async def run(self, number: int, speculation: SpeculationSettings) -> float:
        """Run a request to its end; returns when its first token came."""
        transport, connection = self._kept[number]
        content = json.dumps(completion(number, speculation)).encode()
        transport.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        first, received = await connection.response(LAST_CHUNK)
        said = next(line for line in received.splitlines() if b'"usage":{' in line)
        usage = json.loads(said.removeprefix(b"data: "))["usage"]
        assert usage["completion_tokens"] == TOKENS, f"request {number} ended with {usage}"
        return first


def completion(number: int, speculation: SpeculationSettings) -> dict[str, object]:
    """The benchmark's request as HTTP has it."""
    asked = request(number, TOKENS, speculation)
    chosen = {"drafter": speculation.drafter, "num_draft_tokens": speculation.num_draft_tokens}
    return {
        "prompt": list(asked.token_ids or ()),
        "seed": asked.seed,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,  # or a token that has no text yet would have no event
        "stream_options": {"include_usage": True},
        "paceline": {"off": True} if speculation.off else chosen,
    }


async def over_grpc(client: AsyncClient, number: int, speculation: SpeculationSettings) -> float:
    """As `StreamingClient.run`."""
    first = 0.0
    async for event in client.stream(request(number, TOKENS, speculation)):
        if isinstance(event, Tokens):
            first = first or time.perf_counter()
        elif isinstance(event, Finished):
            assert event.stats.committed == TOKENS, f"request {number} ended with {event.stats.committed} tokens"
    return first


Run = Callable[[int, SpeculationSettings], Awaitable[float]]


async def wave(services: HttpServices, run: Run, clients: int, speculation: SpeculationSettings) -> HttpTurn:
    """Run the same requests at once."""
    before, began = services.cpu_seconds(), time.perf_counter()
    firsts = await asyncio.gather(*(run(number, speculation) for number in range(clients)))
    seconds = time.perf_counter() - began
    tokens = clients * TOKENS
    cpu_ms = {name: (used - before[name]) * 1e3 / tokens for name, used in services.cpu_seconds().items()}
    return HttpTurn(tokens / seconds, statistics.median(first - began for first in firsts) * 1e3, cpu_ms)


async def measure(services: HttpServices, turns: int) -> list[HttpCostRow]:
    """Every mode at every number of clients, after a turn of each that isn't counted."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(services.address_of("coordinator")))
        http = StreamingClient(services.address_of("gateway"))

        async def grpc(number: int, speculation: SpeculationSettings) -> float:
            return await over_grpc(client, number, speculation)

        runs: Mapping[str, Run] = {"grpc": grpc, "grpc again": grpc, "http": http.run}
        return [await _row(services, http, runs, mode, clients, turns) for mode in MODES for clients in CLIENTS]


async def _row(
    services: HttpServices, http: StreamingClient, runs: Mapping[str, Run], mode: str, clients: int, turns: int
) -> HttpCostRow:
    found: dict[str, list[HttpTurn]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            await http.connect(clients if way == "http" else 0)
            measured = await wave(services, runs[way], clients, MODES[mode])
            found[way] += [measured] if turn else []
    return HttpCostRow(mode, clients, {way: tuple(each) for way, each in found.items()})


@signals_interrupt()
def main() -> None:
    """Run, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, help="Of each mode and number of clients.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    before = load_average()
    with (
        tempfile.TemporaryDirectory() as folder,
        HttpServices(Path(folder)) as services,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,  # the services' loop
    ):
        rows = runner.run(measure(services, given.turns))
    settings = {
        "target": PAIR.target,
        "draft": PAIR.draft,
        "tokens of a request": str(TOKENS),
        "load average": f"{before} before, {load_average()} after",
    }
    costs = [row.costs(way) for row in rows for way in ("grpc", "http")]
    tables = f"{markdown_table([row.columns() for row in rows])}\nCPU by process:\n\n{markdown_table(costs)}"
    print(write_rows(given.out, "http-cost", settings, rows, tables))


if __name__ == "__main__":
    main()
