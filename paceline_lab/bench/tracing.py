"""What tracing costs: `python -m paceline_lab.bench.tracing --out docs/reports`.

Three groups of services on one simulated pair stand beside each other: two without an exporter, whose ratio is the
run's own noise, and one that samples every request and exports to a receiver in a process of its own, which reads
nothing. The same requests run through them in turns, and every second turn runs backwards; a ratio is of one turn.
The CPU time of the services is what others on the machine disturb least; spans are exported five times a second, so
that their export falls into the turn that made them.

The critical path is measured in this process: what one round leaves there at the coordinator (a span begun, a record
handed over) and at a service (a step recorded), in microseconds: the least of twenty runs of two hundred, since what
else the machine does is not the code's.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import psutil

from paceline.client import AsyncClient
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.runtime import telemetry
from paceline.runtime.stopping import signals_interrupt
from paceline_lab import REPORTS
from paceline_lab.bench.call_times import run_times_us
from paceline_lab.bench.simulated.load import run_wave
from paceline_lab.bench.simulated.services import ModelServices, SimulatedPair, drafted
from paceline_lab.reporting.figures import Spread, lower_bound
from paceline_lab.reporting.presentation import markdown_table, spread_text, verdict
from paceline_lab.reporting.reports import load_average, write_rows

PAIR = SimulatedPair("distribution=middling", 11.45, 2.0)
"""A step of a large model on a GPU, and one of its draft."""
SESSIONS = (1, 8, 32)
TOKENS = 128
BAR = 0.98
BAR_US = {"off": 5.0, "not sampled": 5.0, "sampled": 50.0}
OFF: Mapping[str, str] = {"OTEL_SDK_DISABLED": "true"}
SOON: Mapping[str, str] = {"OTEL_BSP_SCHEDULE_DELAY": "200"}
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
RUNS, ROUNDS = 20, 200
LONG = {"OTEL_BSP_SCHEDULE_DELAY": "60000", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1000000"}
"""The exporter's thread sleeps while the critical path is measured."""


@dataclass(frozen=True)
class TracingRow:
    """One concurrency: tokens per second, and CPU ms of all three services for a token, of each group by turns."""

    sessions: int
    tokens_per_second: dict[str, tuple[float, ...]]
    cpu_ms: dict[str, tuple[float, ...]]

    def ratios(self, group: str) -> list[float]:
        """A group's throughput over that of `off`, turn by turn."""
        pairs = zip(self.tokens_per_second[group], self.tokens_per_second["off"], strict=True)
        return [mine / off for mine, off in pairs]

    def columns(self) -> dict[str, object]:
        """Of the report's table."""
        traced = self.ratios("traced")
        cpu = {group: f"{Spread.of(values).median:.3f}" for group, values in self.cpu_ms.items()}
        return {
            "sessions": self.sessions,
            "turns": len(traced),
            "off tokens/s": spread_text(Spread.of(self.tokens_per_second["off"])),
            "traced ÷ off": spread_text(Spread.of(traced), 3),
            "lower bound": f"{lower_bound(traced):.3f}",
            "off again ÷ off": spread_text(Spread.of(self.ratios("off again")), 3),
            "at least .98": verdict(Spread.of(traced).median, BAR),
            "CPU ms a token: off": cpu["off"],
            "off again": cpu["off again"],
            "traced": cpu["traced"],
        }


class TracedServices(ModelServices):
    """A target, a draft service and a coordinator, traced as their environment says."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(folder, PAIR.target, PAIR.draft)
        self._environment = dict(environment)

    def start_all(self) -> None:
        """Start all three."""
        super().start_all()
        self.start("coordinator", "coordinator", {"model": PAIR.target, "server.port": 0} | self._peers())
        self.await_serving("coordinator")
        self.await_links()

    def cpu_seconds(self) -> float:
        """What the services have used so far, in user and system mode."""
        used = [psutil.Process(process.pid).cpu_times() for process in self.processes.values()]
        return float(sum(each.user + each.system for each in used))

    def _peers(self) -> dict[str, object]:
        return {f"{name}.address": self.address_of(name) for name in ("target", "draft")}


@contextmanager
def receiver() -> Iterator[str]:
    """A process that takes spans and reads none of them; yields its endpoint."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that one that dies is noticed
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.send(None)
        process.join()


def _receive(parent: Connection) -> None:
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server = grpc.server(
        ThreadPoolExecutor(1), handlers=[_OneMethod(handler)], options=[("grpc.max_receive_message_length", -1)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    parent.send(port)
    parent.recv()
    server.stop(None)


class _OneMethod(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def service(self, handler_call_details: Any) -> Any:
        return self._handler if handler_call_details.method == EXPORT else None


async def measure(groups: Mapping[str, tuple[TracedServices, AsyncClient]], sessions: int, turns: int) -> TracingRow:
    """Run turns, after one that isn't counted."""
    speeds: dict[str, list[float]] = {group: [] for group in groups}
    cpu_ms: dict[str, list[float]] = {group: [] for group in groups}
    for turn in range(turns + 1):
        for group in sorted(groups, reverse=turn % 2 == 1):
            services, client = groups[group]
            before = services.cpu_seconds()
            wave = await run_wave(client, sessions, TOKENS, drafted(4))
            speeds[group] += [wave.tokens_per_second] if turn else []
            cpu_ms[group] += [(services.cpu_seconds() - before) * 1e3 / (sessions * TOKENS)] if turn else []
    return TracingRow(
        sessions,
        {group: tuple(values) for group, values in speeds.items()},
        {group: tuple(values) for group, values in cpu_ms.items()},
    )


async def measure_all(groups: Mapping[str, TracedServices], sessions: Sequence[int], turns: int) -> list[TracingRow]:
    """Every concurrency."""
    async with AsyncExitStack() as stack:
        reached = {
            group: (services, await stack.enter_async_context(AsyncClient(services.address_of("coordinator"))))
            for group, services in groups.items()
        }
        return [await measure(reached, count, turns) for count in sessions]


def critical_path(endpoint: str) -> Iterator[dict[str, object]]:
    """A row for each way to trace: microseconds of a round at the coordinator, and of a step at a service."""
    ways: dict[str, dict[str, str]] = {
        "off": dict(OFF),
        "not sampled": {"OTEL_TRACES_SAMPLER": "always_off"},
        "sampled": {"OTEL_TRACES_SAMPLER": "always_on"},
    }
    for name, variables in ways.items():
        with mock.patch.dict(os.environ, LONG | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} | variables):
            telemetry.configure("benchmark")
        with telemetry.start_request("benchmark", {}) as trace:
            spent = {"round": _least_us(_rounder(trace)), "step": _least_us(_stepper(trace))}
        telemetry.shutdown()
        columns = {f"{part} µs": f"{us:.1f}" for part, us in spent.items()}
        yield {"requests are": name, **columns, "at most": BAR_US[name], "held": max(spent.values()) <= BAR_US[name]}


def _rounder(trace: telemetry.RequestTrace) -> Callable[[], None]:
    return lambda: trace.start_round().finish(RECORD, 0.0)


def _stepper(trace: telemetry.RequestTrace) -> Callable[[], None]:
    traceparent = trace.start_round().traceparent
    return lambda: telemetry.record_step(traceparent, "verify", RECORD.target)


def _least_us(body: Callable[[], None]) -> float:
    return min(run_times_us(body, RUNS, ROUNDS))


_STEP = StepTimings(1.0, 11.0, 0.3, 12.5, 5, 1)
RECORD = RoundRecord(7, 15.0, 1.0, 0.6, _STEP, 0.2, 4, 3, True, "model", _STEP)


@signals_interrupt()
def main() -> None:
    """Run, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="Of each concurrency.")
    parser.add_argument("--sessions", type=int, nargs="*", default=SESSIONS, help="Requests at once.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    before = load_average()
    with tempfile.TemporaryDirectory() as folder, receiver() as endpoint:
        paths = list(critical_path(endpoint))
        exporting = {**SOON, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        environments = {"off": OFF, "off again": OFF, "traced": exporting}
        groups = {name: TracedServices(Path(folder) / name, each) for name, each in environments.items()}
        with ExitStack() as stack:
            for services in groups.values():
                stack.enter_context(services)
            rows = asyncio.run(measure_all(groups, given.sessions, given.turns))
    settings = {
        "target": PAIR.target,
        "draft": PAIR.draft,
        "tokens of a request": str(TOKENS),
        "load average": f"{before} before, {load_average()} after",
    }
    tables = (
        f"## Throughput, every request sampled\n\n{markdown_table([row.columns() for row in rows])}\n"
        f"## On a round's critical path\n\n{markdown_table(paths)}"
    )
    print(write_rows(given.out, "tracing", settings, rows, tables))


if __name__ == "__main__":
    main()
