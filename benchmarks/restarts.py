"""Rolling restarts and rotated certificates under load: `python -m benchmarks.restarts --out docs/reports`.

Two targets, two draft services and two coordinators on simulated models, under mutual TLS. Requests run all the
time on both coordinators, and each text is compared with the same target-only and undisturbed. One service after the
other, in an order that the seed gives, gets SIGTERM, must exit with 0, and is started again; every role gets a new
certificate before each restart. The run fails if a request is lost or its text changed, or if no service read its
files again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from benchmarks import REPORTS
from benchmarks.many_services import COORDINATORS, PEERS, ManyServices
from benchmarks.reporting.figures import percentile
from benchmarks.reporting.presentation import markdown_table
from benchmarks.reporting.reports import write_rows
from paceline.client import AsyncClient
from paceline.local.certificates import write_certificates
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest, SpeculationSettings, Tokens
from paceline.runtime.config import PeerSettings
from paceline.runtime.stopping import signals_interrupt

TARGET = "table:vocab=300,seed=1,eos=299,step_ms=4"
DRAFT = "table:vocab=300,seed=1,eos=299,noise=0.2,step_ms=1"
TEXTS = 16
TOKENS = 200
USERS = 3
"""Requests at once on each coordinator."""
STOP_SECONDS = 30.0
LIFETIME = timedelta(hours=1)
BETWEEN_REQUESTS = 8
"""Requests that end between two restarts, so that every restart meets running ones."""


def request(number: int, *, off: bool = False) -> GenerateRequest:
    """One of `TEXTS` requests."""
    return GenerateRequest(
        token_ids=(10, 200, 30 + number % TEXTS),
        seed=number % TEXTS,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        speculation=SpeculationSettings(off=off),
    )


@dataclass
class Load:
    """What the users saw. Gaps are between two messages with tokens of a stream, in milliseconds."""

    expected: Sequence[tuple[int, ...]]
    requests: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def user(self, coordinator: str | PeerSettings, first: int) -> None:
        """Ask one request after the other until it is over."""
        number = first
        async with AsyncClient(coordinator) as client:
            while not self.over.is_set():
                await self._ask(client, number)
                number += 1

    async def _ask(self, client: AsyncClient, number: int) -> None:
        ids: list[int] = []
        last = time.perf_counter()
        try:
            async for event in client.stream(request(number)):
                if isinstance(event, Tokens):
                    ids += event.token_ids
                    now = time.perf_counter()
                    self.gaps_ms.append((now - last) * 1e3)
                    last = now
        except PacelineError as error:
            self.lost.append(f"{error.reason}: {error.message}")
        else:
            if tuple(ids) != self.expected[number % TEXTS]:
                self.changed.append(number)
        self.requests += 1


@dataclass(frozen=True)
class Restart:
    """One service's; seconds from the signal to its end, and from its start until it serves."""

    label: str
    exit_code: int | None
    drained_s: float
    serving_s: float
    requests: int
    lost: int
    changed: int
    longest_gap_ms: float


async def undisturbed(coordinator: str | PeerSettings) -> list[tuple[int, ...]]:
    """Every text, target-only."""
    async with AsyncClient(coordinator) as client:
        wanted = [client.generate(request(number, off=True)) for number in range(TEXTS)]
        return [generation.token_ids for generation in await asyncio.gather(*wanted)]


async def restart(services: ManyServices, label: str, load: Load) -> Restart:
    """Stop a service and start it again, then wait until more requests have ended."""
    before = load.requests, len(load.lost), len(load.changed), len(load.gaps_ms)
    process = services.processes[label]
    assert services.tls is not None
    await asyncio.to_thread(write_certificates, services.tls, lifetime=LIFETIME)
    began = time.perf_counter()
    process.signal(signal.SIGTERM)
    exit_code = await asyncio.to_thread(process.wait, STOP_SECONDS)
    ended = time.perf_counter()
    await asyncio.to_thread(services.start_again, label)
    await asyncio.to_thread(services.await_serving, label)
    serving = time.perf_counter()
    async with asyncio.timeout(STOP_SECONDS):
        while load.requests < before[0] + BETWEEN_REQUESTS:  # noqa: ASYNC110 - users have no event for it
            await asyncio.sleep(0.02)
    return Restart(
        label=label,
        exit_code=exit_code,
        drained_s=ended - began,
        serving_s=serving - ended,
        requests=load.requests - before[0],
        lost=len(load.lost) - before[1],
        changed=len(load.changed) - before[2],
        longest_gap_ms=max(load.gaps_ms[before[3] :], default=0.0),
    )


async def run(services: ManyServices, rounds: int, seed: int) -> tuple[Load, list[Restart]]:
    """Restart every service so many times, in an order that the seed gives."""
    order = [label for _ in range(rounds) for label in (*PEERS, *COORDINATORS)]
    random.Random(seed).shuffle(order)  # noqa: S311 - no secret
    load = Load(await undisturbed(services.reach(COORDINATORS[0])))
    coordinators = [services.reach(label) for label in COORDINATORS]
    users = [
        asyncio.create_task(load.user(coordinator, place * USERS + number))
        for place, coordinator in enumerate(coordinators)
        for number in range(USERS)
    ]
    restarts = [await restart(services, label, load) for label in order]
    load.over.set()
    await asyncio.gather(*users)
    return load, restarts


def rotations_read(services: ManyServices) -> int:
    """How often running services took up a new certificate, by their logs."""
    return sum(
        process.log_file.read_text().count("TLS files read again: section=server")
        for process in services.processes.values()
    )


def report(load: Load, restarts: Sequence[Restart], rotations: int) -> str:
    """A table of all together and one of each restart."""
    totals = {
        "requests": load.requests,
        "restarts, each behind new certificates for all": len(restarts),
        "times that services read certificates again": rotations,
        "lost": len(load.lost),
        "changed texts": len(load.changed),
        "exit codes that are not 0": sum(each.exit_code != 0 for each in restarts),
        "gap between tokens p50, ms": percentile(load.gaps_ms, 50),
        "gap between tokens p99, ms": percentile(load.gaps_ms, 99),
        "longest gap, ms": max(load.gaps_ms),
    }
    rows = [
        {
            "service": each.label,
            "exit code": each.exit_code,
            "drained s": each.drained_s,
            "serving again s": each.serving_s,
            "requests ended meanwhile": each.requests,
            "lost": each.lost,
            "changed": each.changed,
            "longest gap ms": each.longest_gap_ms,
        }
        for each in restarts
    ]
    summary = markdown_table([{"what": name, "value": value} for name, value in totals.items()])
    return f"{summary}\n{markdown_table(rows)}"


@signals_interrupt()
def main() -> None:
    """Run, write the report, and fail if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="Restarts of each service.")
    parser.add_argument("--seed", type=int, default=0, help="Of the order.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tls = Path(folder) / "tls"
        write_certificates(tls, lifetime=LIFETIME)
        with ManyServices(Path(folder), TARGET, DRAFT, tls) as services:
            load, restarts = asyncio.run(run(services, given.rounds, given.seed))
            rotations = rotations_read(services)
    settings = {"target": TARGET, "draft": DRAFT, "users": str(USERS * len(COORDINATORS)), "tokens": str(TOKENS)}
    print(write_rows(given.out, "restarts", settings, restarts, report(load, restarts, rotations)))
    failures = [*load.lost, *(f"text {number} changed" for number in load.changed)]
    failures += [f"{each.label} exited with {each.exit_code}" for each in restarts if each.exit_code != 0]
    if not rotations:
        failures.append("no service read its certificate again")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
