"""Cases of a fuzzer: each is fixed by surface, seed and index, and what became of it is a name.

A surface takes one case at a time. What it answers with is counted by name: `accepted`, or the reason of a typed
error. Whatever else happens raises `Untyped`, which says what: a finding.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.protocol.errors import PacelineError

ACCEPTED = "accepted"
CASE_S = 60.0
"""A case that takes longer hangs: the slowest one has a grammar compiled, whose own limit is far below."""
SLOW_S = 2.0
"""What a case may take that runs in this process. Without defects the slowest takes some 50 ms."""
GROWN_BYTES = 256 << 20
"""What the process may grow by in one case: 64 frames of 4 MiB, gRPC's own limit, at once."""


class Untyped(AssertionError):
    """Something else than an answer or a typed error."""


@dataclass(frozen=True)
class FuzzCase:
    """One case: all its choices come from `rng`, a new one each time."""

    surface: str
    seed: int
    index: int

    @property
    def rng(self) -> random.Random:
        """The same choices wherever it is asked for."""
        return random.Random(f"{self.surface} {self.seed} {self.index}")

    @property
    def replay(self) -> str:
        return f"python -m tests.fuzz {self.surface} --seed {self.seed} --index {self.index}"


class FuzzTarget(Protocol):
    async def run(self, case: FuzzCase) -> str:
        """What a case was answered with. Raises `Untyped` for what may not be."""

    async def probe(self) -> None:
        """Raise unless an ordinary request gets its right answer, and nothing is held after it."""

    def facts(self) -> dict[str, str]:
        """What a report says of the run besides."""


@dataclass(frozen=True)
class FuzzSurface:
    """A way in. `open` starts what is under test, given the seed; an ordinary request follows `probe_every` cases."""

    name: str
    open: Callable[[int], AbstractAsyncContextManager[FuzzTarget]]
    probe_every: int


@dataclass(frozen=True)
class FuzzFinding:
    case: FuzzCase
    what: str


@dataclass
class SurfaceTally:
    surface: str
    seed: int
    first: int
    cases: int = 0
    seconds: float = 0.0
    slowest_ms: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[FuzzFinding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


async def fuzz(surface: FuzzSurface, seed: int, indices: range, most_findings: int = 10) -> SurfaceTally:
    """Try cases one after the other; an ordinary request follows every `probe_every` of them, and the last."""
    tally = SurfaceTally(surface.name, seed, indices.start)
    began = time.monotonic()
    async with surface.open(seed) as target:
        await target.probe()
        for index in indices:
            case = FuzzCase(surface.name, seed, index)
            await _tried(target, case, tally)
            if (index + 1) % surface.probe_every == 0 or index == indices[-1]:
                async with _findings(tally, case, "an ordinary request after it: "):
                    await target.probe()
            if len(tally.findings) >= most_findings:
                break
        tally.facts = target.facts()
    tally.seconds = time.monotonic() - began
    return tally


async def _tried(target: FuzzTarget, case: FuzzCase, tally: SurfaceTally) -> None:
    started, peak = time.monotonic(), _peak_bytes()
    async with _findings(tally, case):
        with untyped_logs() as logged:
            kind = await target.run(case)
        if logged:
            raise Untyped(f"logged: {logged[0]}")
        grown = _peak_bytes() - peak
        if grown > GROWN_BYTES:
            raise Untyped(f"the process grew by {grown >> 20} MiB")
        tally.kinds[kind] += 1
    tally.cases += 1
    tally.slowest_ms = max(tally.slowest_ms, (time.monotonic() - started) * 1e3)


@asynccontextmanager
async def _findings(tally: SurfaceTally, case: FuzzCase, where: str = "") -> AsyncIterator[None]:
    """Whatever goes wrong in the block, or takes too long, is a finding."""
    try:
        async with asyncio.timeout(CASE_S):
            yield
    except Exception as error:  # noqa: BLE001
        tally.findings.append(FuzzFinding(case, f"{where}{type(error).__name__}: {error}"[:400]))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def typed(error: PacelineError) -> str:
    """The name under which a typed error is counted; an internal one is none."""
    if error.reason == "INTERNAL":
        raise Untyped(f"{type(error).__name__}: {error.message}") from error
    return error.reason


def within(seconds: float, began: float) -> None:
    """Refuse a case that has computed for too long on this thread since `began`, by `time.thread_time`."""
    took = time.thread_time() - began
    if took > seconds:
        raise Untyped(f"took {took:.1f} s")


@contextmanager
def untyped_logs() -> Iterator[list[str]]:
    """What is logged with a stack meanwhile: an exception that nobody foresaw."""
    logged: list[str] = []

    class Watching(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.levelno >= logging.ERROR:
                logged.append(f"{record.name}: {record.getMessage()} {record.exc_info[1]!r}")

    handler = Watching()
    logging.getLogger().addHandler(handler)
    try:
        yield logged
    finally:
        logging.getLogger().removeHandler(handler)


def keep_tally(folder: Path, tally: SurfaceTally) -> None:
    """Write a surface's results, in place of those of the same seed and first case."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{tally.surface}-{tally.seed}-{tally.first}.json"
    # `asdict` makes another Counter of a Counter.
    plain = asdict(replace(tally, kinds=Counter())) | {"kinds": dict(tally.kinds)}
    file.write_text(json.dumps(plain, indent=1) + "\n")


def kept_tallies(folder: Path) -> list[SurfaceTally]:
    return [_tally(json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]


def _tally(value: dict[str, Any]) -> SurfaceTally:
    findings = [FuzzFinding(FuzzCase(**each["case"]), each["what"]) for each in value["findings"]]
    return SurfaceTally(**{**value, "kinds": Counter(value["kinds"]), "findings": findings})
