"""Many sessions with cancels and killed coordinators in the mix: `python -m benchmarks.soak --out docs/reports`.

A target with a KV budget that holds a few sessions at a time, and a coordinator, in processes of their
own. Requests come in waves: some run to their end, some are cancelled before their first token or behind
one, and in every fifth wave the coordinator is killed with all of its sessions and another one started.
Prompts share beginnings, so blocks are shared, copied and given up. The run fails unless in the end the
target holds no session and no KV row, never held more rows than its budget, and its resident memory grew
by no more than the budget and the workspace that it planned.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import REPORTS
from benchmarks.reporting.presentation import markdown_table
from benchmarks.reporting.reports import write_rows
from paceline.client import AsyncClient
from paceline.local.service_process import Flags
from paceline.local.services import LocalServices
from paceline.local.settings import available_cores
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import Finished, GenerateRequest, SpeculationSettings, Started, Tokens
from paceline.protocol.handshake import ServiceStatus
from paceline.runtime.config import DEFAULT_MODEL
from paceline.runtime.stopping import signals_interrupt

START_SECONDS = 120.0
END_SECONDS = 30.0
POLL_SECONDS = 0.05
KILL_EVERY = 5
OFF = SpeculationSettings(off=True)
MIB = 1 << 20


@dataclass(frozen=True)
class Soak:
    """What is run."""

    model: str = DEFAULT_MODEL
    sessions: int = 500
    wave: int = 25
    kv_bytes: int = 64 * MIB
    tokens: int = 24
    vocabulary: int = 32_000
    seed: int = 7


@dataclass
class Found:
    """What came of it; bytes and rows are the target's own figures."""

    outcomes: dict[str, int] = field(default_factory=dict)
    kills: int = 0
    seconds: float = 0.0
    most_kv_rows: int = 0
    max_kv_rows: int = 0
    resident_before: int = 0
    most_resident: int = 0
    allowed_growth: int = 0
    sessions_left: int = -1
    kv_rows_left: int = -1
    queue_left: int = -1

    def check(self) -> None:
        """Fail on what was left behind or passed its bound.

        Raises:
            AssertionError: naming the figure.
        """
        left = (self.sessions_left, self.kv_rows_left, self.queue_left)
        assert left == (0, 0, 0), f"sessions, KV rows and queue at the end: {left}"
        assert self.most_kv_rows <= self.max_kv_rows, f"{self.most_kv_rows} KV rows of {self.max_kv_rows}"
        grown = self.most_resident - self.resident_before
        assert grown <= self.allowed_growth, f"grown by {grown} bytes, planned {self.allowed_growth}"


class SoakPair(LocalServices):
    """A target, and a coordinator that can be killed and replaced."""

    def __init__(self, folder: Path, soak: Soak) -> None:
        super().__init__(folder, start_timeout_s=START_SECONDS)
        self._soak = soak

    def start_all(self) -> None:
        """Start the target with every core and the stated KV budget, then the coordinator."""
        threads = available_cores(os.environ)
        target: Flags = {"model": self._soak.model, "server.port": 0, "engine.threads": threads}
        self.start("target", "target", target | {"engine.kv_bytes": self._soak.kv_bytes}, threads)
        self.await_serving("target")
        self.start("coordinator", "coordinator", self.coordinator_flags() | {"drafter": "ngram"})
        self.await_serving("coordinator")
        self.await_links()

    def replace_coordinator(self) -> None:
        """Start another one where the killed one was; returns when it is linked to the target."""
        self.start_again("coordinator")
        self.await_serving("coordinator")
        self.await_links()

    def planned_growth(self) -> int:
        """Bytes of KV and workspace in the target's own plan, or of KV alone for a table model."""
        plan = re.search(r"workspace ([\d.]+) MiB", self.processes["target"].log_file.read_text())
        return self._soak.kv_bytes + int(float(plan[1]) * MIB if plan else 64 * MIB)


def make_request(soak: Soak, number: int, source: random.Random) -> GenerateRequest:
    """A prompt that begins as others do, and ends as none does."""
    beginning = random.Random(number % 3).choices(range(soak.vocabulary), k=160)  # noqa: S311 - no secret
    prompt = (*beginning[: source.choice([10, 70, 160])], *source.choices(range(soak.vocabulary), k=3))
    tokens = source.randint(1, soak.tokens)
    speculation = source.choice([OFF, SpeculationSettings(drafter="ngram", num_draft_tokens=4)])
    return GenerateRequest(
        token_ids=prompt, seed=number, max_new_tokens=tokens, ignore_eos=True, speculation=speculation
    )


async def use(client: AsyncClient, request: GenerateRequest, cancel_after: int | None) -> str:
    """Run a request, or leave its stream after so many messages with tokens; says how it ended."""
    seen = 0
    try:
        stream = client.stream(request)
        async for event in stream:
            seen += isinstance(event, Tokens)
            if cancel_after is not None and isinstance(event, Started | Tokens) and seen >= cancel_after:
                await stream.aclose()
                return "cancelled"
            if isinstance(event, Finished):
                return "finished"
    except PacelineError as error:
        return error.reason
    return "ended"


async def run_wave(
    pair: SoakPair, soak: Soak, numbers: range, source: random.Random, found: Found, *, kill: bool
) -> None:
    """Run requests at once; with `kill` the coordinator dies once a third of them have ended."""
    async with AsyncClient(pair.address, resume_wait_s=0) as client:
        users = [
            asyncio.create_task(
                use(client, make_request(soak, number, source), source.choice([None, None, None, 0, 1, 5]))
            )
            for number in numbers
        ]
        watch = asyncio.create_task(_watch(pair, found))
        if kill:
            for ended in itertools.islice(asyncio.as_completed(users), len(users) // 3):
                await ended
            pair.kill("coordinator")
            found.kills += 1
        for outcome in await asyncio.gather(*users):
            found.outcomes[outcome] = found.outcomes.get(outcome, 0) + 1
        watch.cancel()


async def _watch(pair: SoakPair, found: Found) -> None:
    while True:
        _note(await asyncio.to_thread(pair.status, "target"), found)
        await asyncio.sleep(POLL_SECONDS)


def _note(status: ServiceStatus, found: Found) -> None:
    found.most_kv_rows = max(found.most_kv_rows, status.kv_rows)
    found.most_resident = max(found.most_resident, status.resident_bytes)
    found.max_kv_rows = status.max_kv_rows


def run(soak: Soak, folder: Path) -> Found:
    """All waves, then wait until the target holds nothing, or for `END_SECONDS`."""
    source, found = random.Random(soak.seed), Found()  # noqa: S311 - no secret
    with SoakPair(folder, soak) as pair:
        found.resident_before, found.allowed_growth = pair.status("target").resident_bytes, pair.planned_growth()
        started = time.monotonic()
        for place, first in enumerate(range(0, soak.sessions, soak.wave)):
            kill = place % KILL_EVERY == KILL_EVERY - 1
            numbers = range(first, min(first + soak.wave, soak.sessions))
            asyncio.run(run_wave(pair, soak, numbers, source, found, kill=kill))
            if kill:
                pair.replace_coordinator()
        found.seconds = time.monotonic() - started
        deadline = time.monotonic() + END_SECONDS
        while (status := pair.status("target")).sessions or status.kv_rows or status.queue_length:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        _note(status, found)
        found.sessions_left, found.kv_rows_left = status.sessions, status.kv_rows
        found.queue_left = status.queue_length
        assert pair.processes["target"].exit_code is None, "the target outlived them all"
    return found


def report(found: Found) -> str:
    """One table."""
    figures = {
        "sessions by outcome": ", ".join(f"{name} {count}" for name, count in sorted(found.outcomes.items())),
        "coordinators killed": found.kills,
        "seconds": f"{found.seconds:.0f}",
        "KV rows at most, and the budget": f"{found.most_kv_rows} of {found.max_kv_rows}",
        "resident memory before, MiB": found.resident_before // MIB,
        "resident memory at most, MiB": found.most_resident // MIB,
        "growth that the plan allows, MiB": found.allowed_growth // MIB,
        "sessions, KV rows, queue at the end": f"{found.sessions_left}, {found.kv_rows_left}, {found.queue_left}",
    }
    return markdown_table([{"what": name, "value": value} for name, value in figures.items()])


@signals_interrupt()
def main() -> None:
    """Run, write the report, and fail if something was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--kv-mib", type=int, default=64, help="The target's KV budget.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    soak = Soak(model=given.model, sessions=given.sessions, kv_bytes=given.kv_mib * MIB)
    with tempfile.TemporaryDirectory() as folder:
        found = run(soak, Path(folder))
    settings = {"model": soak.model, "KV budget": f"{given.kv_mib} MiB", "requests at once": str(soak.wave)}
    print(write_rows(given.out, "soak", settings, [found], report(found)))
    found.check()


if __name__ == "__main__":
    main()
