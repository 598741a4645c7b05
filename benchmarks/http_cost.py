"""What HTTP costs beside gRPC: `python -m benchmarks.http_cost --out docs/reports`.

One simulated pair, one coordinator, and a gateway before it. The same requests run straight to the coordinator, as
events of gRPC, and through the gateway, as streamed completions; gRPC runs twice, and the ratio of the two is the
run's own noise. The ways run in turns, and every second turn runs backwards; a ratio is of one turn.

Both clients live in this process. That of HTTP has its connections before the clock starts, and reads lines
of sockets: what it spends on them is no cost of the gateway's, so it does the least that shows when tokens came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import REPORTS
from benchmarks.reporting.figures import Spread, lower_bound
from benchmarks.reporting.presentation import markdown_table, spread_text, verdict
from benchmarks.reporting.reports import load_average, write_rows
from benchmarks.simulated.services import OFF, ModelServices, SimulatedPair, drafted, request
from paceline.client import AsyncClient
from paceline.protocol.generation import Finished, SpeculationSettings, Tokens
from paceline.runtime.stopping import signals_interrupt

PAIR = SimulatedPair("distribution=middling", 11.45, 2.0)
"""A step of a large model on a GPU, and one of its draft."""
MODES: Mapping[str, SpeculationSettings] = {"target-only": OFF, "drafts of 4": drafted(4)}
CLIENTS = (1, 64)
TOKENS = 128
BAR = 0.97
WAYS = ("grpc", "grpc again", "http")


@dataclass(frozen=True)
class HttpTurn:
    """One wave: tokens per second of all clients, the median of their first tokens' times, the gateway's CPU."""

    tokens_per_second: float
    first_token_ms: float
    gateway_cpu_ms: float


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
            "gateway CPU ms a token": f"{statistics.median(t.gateway_cpu_ms for t in self.turns['http']):.3f}",
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

    def gateway_cpu_seconds(self) -> float:
        """What the gateway has used so far, in user and system mode."""
        used = psutil.Process(self.processes["gateway"].pid).cpu_times()
        return float(used.user + used.system)


class StreamingClient:
    """Streams completions over connections of its own."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(self, count: int) -> None:
        """Open as many connections in the place of those that were: the gateway closes idle ones."""
        for _, writer in self._kept:
            writer.close()
        self._kept = [await asyncio.open_connection(self._host, self._port) for _ in range(count)]

    async def run(self, number: int, speculation: SpeculationSettings) -> float:
        """Run a request to its end; returns when its first token came."""
        connection = self._kept.pop()
        reader, writer = connection
        content = json.dumps(completion(number, speculation)).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        first = 0.0
        usage: dict[str, Any] | None = None
        async for line in _lines(reader):
            if b'"token_ids":[' in line:
                first = first or time.perf_counter()
            elif b'"usage":{' in line:
                usage = json.loads(line.removeprefix(b"data: "))["usage"]
        assert usage is not None and usage["completion_tokens"] == TOKENS, f"request {number} ended with {usage}"
        self._kept.append(connection)
        return first


async def _lines(reader: asyncio.StreamReader) -> Any:
    """A response's lines until its last chunk."""
    status = await reader.readline()
    assert status.startswith(b"HTTP/1.1 200"), status
    while (line := await reader.readline()) != b"0\r\n":
        assert line, "the connection was closed"
        yield line
    await reader.readline()


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
    before, began = services.gateway_cpu_seconds(), time.perf_counter()
    firsts = await asyncio.gather(*(run(number, speculation) for number in range(clients)))
    seconds = time.perf_counter() - began
    cpu_ms = (services.gateway_cpu_seconds() - before) * 1e3
    tokens = clients * TOKENS
    return HttpTurn(tokens / seconds, statistics.median(first - began for first in firsts) * 1e3, cpu_ms / tokens)


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
            await http.connect(clients)
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
    with tempfile.TemporaryDirectory() as folder, HttpServices(Path(folder)) as services:
        rows = asyncio.run(measure(services, given.turns))
    settings = {
        "target": PAIR.target,
        "draft": PAIR.draft,
        "tokens of a request": str(TOKENS),
        "load average": f"{before} before, {load_average()} after",
    }
    print(write_rows(given.out, "http-cost", settings, rows, markdown_table([row.columns() for row in rows])))


if __name__ == "__main__":
    main()
