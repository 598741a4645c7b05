"""Rolling restarts of every role under load: `python -m benchmarks.restarts --out docs/reports`.

Two targets, two draft services and two coordinators on simulated models. Requests run all the time on both
coordinators, and each text is compared with the same target-only and undisturbed. One service after the other, in
an order that the seed gives, gets SIGTERM, must exit with 0, and is started again. The run fails if a request is
lost or its text changed.
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
from pathlib import Path

from benchmarks import REPORTS
from benchmarks.many_services import COORDINATORS, PEERS, ManyServices
from benchmarks.reporting.figures import percentile
from benchmarks.reporting.presentation import markdown_table
from benchmarks.reporting.reports import write_rows
from paceline.client import AsyncClient
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest, SpeculationSettings, Tokens
from paceline.runtime.process import sigterm_interrupts

TARGET = "table:vocab=300,seed=1,eos=299,step_ms=4"
DRAFT = "table:vocab=300,seed=1,eos=299,noise=0.2,step_ms=1"
TEXTS = 16
TOKENS = 200
USERS = 3
"""Requests at once on each coordinator."""
STOP_SECONDS = 30.0
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

    async def user(self, address: str, first: int) -> None:
        """Ask one request after the other until it is over."""
        number = first
        async with AsyncClient(address) as client:
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


async def undisturbed(address: str) -> list[tuple[int, ...]]:
    """Every text, target-only."""
    async with AsyncClient(address) as client:
        wanted = [client.generate(request(number, off=True)) for number in range(TEXTS)]
        return [generation.token_ids for generation in await asyncio.gather(*wanted)]


async def restart(services: ManyServices, label: str, load: Load) -> Restart:
    """Stop a service and start it again, then wait until more requests have ended."""
    before = load.requests, len(load.lost), len(load.changed), len(load.gaps_ms)
    process = services.processes[label]
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
    load = Load(await undisturbed(services.address_of(COORDINATORS[0])))
    addresses = [services.address_of(label) for label in COORDINATORS]
    users = [
        asyncio.create_task(load.user(address, place * USERS + number))
        for place, address in enumerate(addresses)
        for number in range(USERS)
    ]
    restarts = [await restart(services, label, load) for label in order]
    load.over.set()
    await asyncio.gather(*users)
    return load, restarts


def report(load: Load, restarts: Sequence[Restart]) -> str:
    """A table of all together and one of each restart."""
    totals = {
        "requests": load.requests,
        "restarts": len(restarts),
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


@sigterm_interrupts()
def main() -> None:
    """Run, write the report, and fail if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="Restarts of each service.")
    parser.add_argument("--seed", type=int, default=0, help="Of the order.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ManyServices(Path(folder), TARGET, DRAFT) as services:
        load, restarts = asyncio.run(run(services, given.rounds, given.seed))
    settings = {"target": TARGET, "draft": DRAFT, "users": str(USERS * len(COORDINATORS)), "tokens": str(TOKENS)}
    print(write_rows(given.out, "restarts", settings, restarts, report(load, restarts)))
    failures = [*load.lost, *(f"text {number} changed" for number in load.changed)]
    failures += [f"{each.label} exited with {each.exit_code}" for each in restarts if each.exit_code != 0]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
