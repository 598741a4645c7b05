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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from benchmarks import REPORTS
from benchmarks.many_services import COORDINATORS, PEERS, ManyServices
from benchmarks.reporting.presentation import markdown_table
from benchmarks.reporting.reports import write_rows
from benchmarks.steady_load import BETWEEN_REQUESTS, DRAFT, TARGET, TOKENS, USERS, Load, SeenByUsers, undisturbed
from paceline.local.certificates import write_certificates
from paceline.runtime.stopping import signals_interrupt

STOP_SECONDS = 30.0
LIFETIME = timedelta(hours=1)


@dataclass(frozen=True)
class Restart(SeenByUsers):
    """One service's; seconds from the signal to its end, and from its start until it serves."""

    label: str
    exit_code: int | None
    drained_s: float
    serving_s: float


async def restart(services: ManyServices, label: str, load: Load) -> Restart:
    """Stop a service and start it again, then wait until more requests have ended."""
    before = load.mark()
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
        while load.since(before).requests < BETWEEN_REQUESTS:  # noqa: ASYNC110 - users have no event for it
            await asyncio.sleep(0.02)
    return Restart(
        label=label,
        exit_code=exit_code,
        drained_s=ended - began,
        serving_s=serving - ended,
        **asdict(load.since(before)),
    )


async def run(services: ManyServices, rounds: int, seed: int) -> tuple[Load, list[Restart]]:
    """Restart every service so many times, in an order that the seed gives."""
    order = [label for _ in range(rounds) for label in (*PEERS, *COORDINATORS)]
    random.Random(seed).shuffle(order)  # noqa: S311 - no secret
    load = Load(await undisturbed(services.reach(COORDINATORS[0])))
    users = load.start([services.reach(label) for label in COORDINATORS])
    restarts = [await restart(services, label, load) for label in order]
    await load.end(users)
    return load, restarts


def rotations_read(services: ManyServices) -> int:
    """How often running services took up a new certificate, by their logs."""
    return sum(
        process.log_file.read_text().count("TLS files read again: section=server")
        for process in services.processes.values()
    )


def report(load: Load, restarts: Sequence[Restart], rotations: int) -> str:
    """A table of all together and one of each restart."""
    events = {
        "restarts, each behind new certificates for all": len(restarts),
        "times that services read certificates again": rotations,
        "exit codes that are not 0": sum(each.exit_code != 0 for each in restarts),
    }
    rows = [
        {
            "service": each.label,
            "exit code": each.exit_code,
            "drained s": each.drained_s,
            "serving again s": each.serving_s,
            **each.columns(),
        }
        for each in restarts
    ]
    return f"{load.table(events)}\n{markdown_table(rows)}"


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
    failures = load.failures
    failures += [f"{each.label} exited with {each.exit_code}" for each in restarts if each.exit_code != 0]
    if not rotations:
        failures.append("no service read its certificate again")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
