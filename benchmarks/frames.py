"""Frames and processor time by the number of sessions: `python -m benchmarks.frames --out docs/reports`.

Timed models wait, so what the processes burn is coordination: the draft's share includes the draws of
its table model, the target's those of verification. CPU is that of whole processes over the sum of all
sessions' rounds; frames are counted on the link, one way, over the steps that the service ran
meanwhile (the draft takes steps all the time, so few of its frames answer one). Without clients: the
same servicer called directly, its text written nowhere (`benchmarks.simulated.headless`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.reporting.reports import write_report
from benchmarks.reporting.tables import markdown_table
from benchmarks.simulated.headless import HeadlessRun
from benchmarks.simulated.replay import FAN_OUT, K
from benchmarks.simulated.services import SimulatedPair, SimulatedServices, drafted, request
from paceline.client import AsyncClient
from paceline.local.service_process import write_config
from paceline.protocol.handshake import ServiceStatus
from paceline.protocol.records import GenerationStats
from paceline.runtime.config import CoordinatorConfig
from paceline.runtime.process import sigterm_interrupts

PAIR = SimulatedPair("law=middling", 30.0, 2.54)
SESSIONS = (1, 16, 64)
HEADLESS_SECONDS = 300.0
FULL_SESSIONS = 16
"""Fewer sessions write that much longer texts, so that their CPU time is many ticks of its clock."""


@dataclass(frozen=True)
class Cost:
    """One wave. Frames are per step of the service and link, CPU milliseconds per session and round."""

    sessions: int
    coordinators: int
    rounds: int
    rounds_per_target_step: float
    tokens_per_second: float
    target_frames_per_step: float
    draft_frames_per_step: float
    coordinator_cpu_ms: float
    draft_cpu_ms: float
    target_cpu_ms: float


@dataclass(frozen=True)
class HeadlessCost:
    """One wave without clients. Frames sent are per round of a session, CPU milliseconds too."""

    sessions: int
    rounds: int
    tokens_per_second: float
    frames_to_target: float
    frames_to_draft: float
    coordinator_cpu_ms: float


@dataclass(frozen=True)
class Meter:
    """Readings of every process at one moment."""

    at: float
    cpu: Mapping[str, float]
    target: ServiceStatus
    draft: ServiceStatus

    @classmethod
    def read(cls, services: SimulatedServices, coordinators: Sequence[str]) -> Meter:
        """Read all."""
        cpu = {label: services.cpu_seconds(label) for label in (*coordinators, "draft", "target")}
        return cls(time.perf_counter(), cpu, services.status("target"), services.status("draft"))


async def run_wave(addresses: Sequence[str], sessions: int, tokens: int) -> list[GenerationStats]:
    """Run sessions at once, divided among coordinators."""
    clients = [AsyncClient(address) for address in addresses]
    try:
        runs = await asyncio.gather(
            *(
                clients[number % len(clients)].generate(request(number, tokens, drafted(K)))
                for number in range(sessions)
            )
        )
    finally:
        for client in clients:
            await client.close()
    return [run.stats for run in runs]


def tokens_of(sessions: int, tokens: int) -> int:
    """Tokens of each request of a wave."""
    return tokens * max(1, FULL_SESSIONS // sessions)


def measure(services: SimulatedServices, sessions: int, coordinators: int, tokens: int) -> Cost:
    """A wave after one that isn't counted."""
    labels = [f"coordinator-{number}" for number in range(coordinators)]
    tokens = tokens_of(sessions, tokens)
    with ExitStack() as stack:
        addresses = [stack.enter_context(services.coordinator(label, {"fan_out": FAN_OUT})) for label in labels]
        asyncio.run(run_wave(addresses, sessions, tokens))
        before = Meter.read(services, labels)
        stats = asyncio.run(run_wave(addresses, sessions, tokens))
        after = Meter.read(services, labels)
    rounds = sum(each.rounds for each in stats)
    cpu_ms = {label: 1e3 * (after.cpu[label] - before.cpu[label]) / rounds for label in after.cpu}
    target_steps = after.target.steps - before.target.steps
    return Cost(
        sessions=sessions,
        coordinators=coordinators,
        rounds=rounds,
        rounds_per_target_step=rounds / target_steps,
        tokens_per_second=sum(each.committed for each in stats) / (after.at - before.at),
        target_frames_per_step=(after.target.frames_sent - before.target.frames_sent) / target_steps / coordinators,
        draft_frames_per_step=(after.draft.frames_sent - before.draft.frames_sent)
        / max(1, after.draft.steps - before.draft.steps)
        / coordinators,
        coordinator_cpu_ms=sum(cpu_ms[label] for label in labels),
        draft_cpu_ms=cpu_ms["draft"],
        target_cpu_ms=cpu_ms["target"],
    )


def measure_headless(services: SimulatedServices, sessions: int, tokens: int, folder: Path) -> HeadlessCost:
    """The same wave by a coordinator that has no clients.

    Raises:
        CalledProcessError: it failed; stderr has its log.
    """
    file = folder / f"headless-{sessions}.toml"
    write_config(CoordinatorConfig, file, services.coordinator_flags() | {"fan_out": FAN_OUT})
    options = {"config": file, "sessions": sessions, "tokens": tokens_of(sessions, tokens), "k": K}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulated.headless", *arguments],
        stdout=subprocess.PIPE,
        check=True,
        timeout=HEADLESS_SECONDS,
    )
    run = HeadlessRun(**json.loads(done.stdout))
    return HeadlessCost(
        sessions=sessions,
        rounds=run.rounds,
        tokens_per_second=run.committed / run.seconds,
        frames_to_target=run.frames_to_target / run.rounds,
        frames_to_draft=run.frames_to_draft / run.rounds,
        coordinator_cpu_ms=1e3 * run.cpu_seconds / run.rounds,
    )


def report(costs: Sequence[Cost], headless: Sequence[HeadlessCost]) -> str:
    """Both tables."""
    first = markdown_table([_titled(asdict(cost)) for cost in costs])
    second = markdown_table([_titled(asdict(cost)) for cost in headless])
    return f"## With clients\n\n{first}\n## Without clients\n\n{second}"


def _titled(row: dict[str, object]) -> dict[str, object]:
    return {name.replace("_", " "): value for name, value in row.items()}


@sigterm_interrupts()
def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", nargs="+", type=int, default=list(SESSIONS))
    parser.add_argument(
        "--tokens", type=int, default=192, help=f"Tokens of a request; more of fewer than {FULL_SESSIONS} sessions."
    )
    parser.add_argument("--out", type=Path, default=Path("docs/reports"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, SimulatedServices(Path(name) / "services", PAIR) as services:
        costs = [measure(services, sessions, 1, given.tokens) for sessions in given.sessions]
        costs += [measure(services, sessions, 2, given.tokens) for sessions in given.sessions if sessions > 1]
        headless = [measure_headless(services, sessions, given.tokens, Path(name)) for sessions in given.sessions]
    settings = {"target": f"`{PAIR.target}`", "draft": f"`{PAIR.draft}`", "tokens": str(given.tokens)}
    settings |= {"k": str(K), "fan-out": str(FAN_OUT)}
    print(write_report(given.out, "frames", settings, [*costs, *headless], report(costs, headless)))


if __name__ == "__main__":
    main()
