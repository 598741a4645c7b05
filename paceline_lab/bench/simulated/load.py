"""Speculation on, off and auto under concurrency, on a target whose steps grow with rows: `paceline bench load`.

On: the model drafter, k = 4 and fan-out 4 in every round, whatever it costs. Off: target-only.
Auto: the coordinator's policy chooses. The three run in turn, again and again, through two
coordinators (on, and the others) that share one target and one draft, every time with the same
requests; each is warmed up once. Throughput is all tokens over the time from the first request to
the last token; latency between tokens is what a client sees between two messages. Every wave's
slowest request is held against target-only's slowest: no request may lose for all to gain.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline.client import AsyncClient
from paceline.protocol.errors import require
from paceline.protocol.generation import Finished, SpeculationSettings, Tokens
from paceline_lab.bench.simulated.replay import FAN_OUT, K
from paceline_lab.bench.simulated.services import OFF, ModelServices, SimulatedPair, drafted, request
from paceline_lab.reporting.figures import Spread, median_with_lower_bound
from paceline_lab.reporting.presentation import Bars, Plot, markdown_table, titled, verdict
from paceline_lab.reporting.progress import Advance, measuring
from paceline_lab.reporting.reports import describe, write_report

MODES: Mapping[str, SpeculationSettings] = {"on": drafted(K), "off": OFF, "auto": drafted(None)}
BAR = 0.97
"""At `BAR_SESSIONS` for all requests together; for each of them, beside target-only, at any load."""
BAR_SESSIONS = 64
PAIRS = {
    "rows cost little": SimulatedPair("distribution=middling", 20.0, 2.0, target_row_ms=0.05, draft_row_ms=0.02),
    "rows cost much": SimulatedPair("distribution=middling", 20.0, 2.0, target_row_ms=0.5, draft_row_ms=0.02),
}
SESSIONS = (1, 2, 4, 8, 16, 32, 64)
MAX_SESSIONS = 256
"""As many requests as a coordinator takes by default."""


@dataclass(frozen=True)
class LoadPlan:
    """What to run.

    Raises:
        InvalidInput: naming the field.
    """

    sessions: Sequence[int] = SESSIONS
    waves: int = 9
    tokens: int = 128

    def __post_init__(self) -> None:
        require(bool(self.sessions), "sessions", self.sessions, "one number or more")
        for count in self.sessions:
            require(1 <= count <= MAX_SESSIONS, "sessions", count, f"in [1, {MAX_SESSIONS}]")
        require(self.waves >= 1, "waves", self.waves, "at least 1")
        require(self.tokens >= 2, "tokens", self.tokens, "at least 2")

    def __len__(self) -> int:
        """Concurrencies, on each target."""
        return len(PAIRS) * len(self.sessions)

    @property
    def facts(self) -> dict[str, str]:
        """For the report."""
        pairs = {name: f"target `{pair.target}`, draft `{pair.draft}`" for name, pair in PAIRS.items()}
        return pairs | {"k": str(K), "fan-out": str(FAN_OUT), "tokens": str(self.tokens), "waves": str(self.waves)}


@dataclass(frozen=True)
class Wave:
    """Sessions that ran at once: throughput of all together, gaps between messages, and what the slowest waited.

    `slowest_ms`: its mean time per token behind its first message; milliseconds, as the gaps are.
    """

    tokens_per_second: float
    gaps_ms: tuple[float, ...]
    slowest_ms: float
    accepted: int
    rounds: int


@dataclass(frozen=True)
class LoadRow:
    """One mode at one concurrency: medians over waves."""

    target: str
    sessions: int
    mode: str
    waves: int
    tokens_per_second: float
    p50_gap_ms: float
    p99_gap_ms: float
    slowest_ms_per_token: float
    tokens_per_round: float


@dataclass(frozen=True)
class Comparison:
    """Auto's speed over others', wave by wave, each with its lower 95 % bound.

    `over_best`: tokens per second over the better of on and off; `slowest_over_off`: the slowest request of a wave
    over target-only's slowest, by mean time per token.
    """

    target: str
    sessions: int
    over_best: float
    over_best_lower: float
    slowest_over_off: float
    slowest_over_off_lower: float


@dataclass(frozen=True)
class LoadResults:
    """All that was measured."""

    comparisons: tuple[Comparison, ...]
    rows: tuple[LoadRow, ...]

    def markdown(self) -> str:
        """The report."""
        return (
            "# Load\n"
            f"\n## Auto\n\n{markdown_table([comparison_row(each) for each in self.comparisons])}\n"
            f"## All modes\n\n{markdown_table([titled(row) for row in self.rows])}"
        )

    def plots(self) -> list[Plot]:
        """One for each target."""
        return [load_plot(target, self.rows) for target in PAIRS]


async def run_wave(client: AsyncClient, sessions: int, tokens: int, speculation: SpeculationSettings) -> Wave:
    """Run the same requests at once."""
    started = time.perf_counter()
    runs = await asyncio.gather(*(_session(client, number, tokens, speculation) for number in range(sessions)))
    seconds = time.perf_counter() - started
    stats = [finished.stats for finished, _, _ in runs]
    return Wave(
        tokens_per_second=sum(each.committed for each in stats) / seconds,
        gaps_ms=tuple(gap for _, gaps, _ in runs for gap in gaps),
        slowest_ms=max(each_ms for _, _, each_ms in runs),
        accepted=sum(each.num_accepted_draft_tokens for each in stats),
        rounds=sum(each.rounds for each in stats),
    )


async def _session(
    client: AsyncClient, number: int, tokens: int, speculation: SpeculationSettings
) -> tuple[Finished, list[float], float]:
    """How a request ended, the gaps between its messages, and its mean time per token behind the first, in ms."""
    arrivals: list[float] = []
    first = 0
    async for event in client.stream(request(number, tokens, speculation)):
        if isinstance(event, Tokens):
            first = first or len(event.token_ids)
            arrivals.append(time.perf_counter())
        elif isinstance(event, Finished):
            gaps_ms = [1e3 * gap for gap in np.diff(arrivals).tolist()]
            return event, gaps_ms, sum(gaps_ms) / max(1, event.stats.committed - first)
    raise AssertionError(f"request {number}: the stream ended unfinished")


async def measure(
    clients: Mapping[str, AsyncClient], name: str, sessions: int, waves: int, tokens: int
) -> tuple[list[LoadRow], Comparison]:
    """Run every mode in turn, `waves` times after one that isn't counted."""
    found: dict[str, list[Wave]] = {mode: [] for mode in MODES}
    for _ in range(waves + 1):
        for mode, speculation in MODES.items():
            found[mode].append(await run_wave(clients[mode], sessions, tokens, speculation))
    counted = {mode: each[1:] for mode, each in found.items()}
    rows = [_row(name, sessions, mode, each) for mode, each in counted.items()]
    best = max(("on", "off"), key=lambda mode: statistics.median(wave.tokens_per_second for wave in counted[mode]))
    over_best = [
        auto.tokens_per_second / other.tokens_per_second
        for auto, other in zip(counted["auto"], counted[best], strict=True)
    ]
    over_off = [off.slowest_ms / auto.slowest_ms for auto, off in zip(counted["auto"], counted["off"], strict=True)]
    return rows, Comparison(name, sessions, *median_with_lower_bound(over_best), *median_with_lower_bound(over_off))


def _row(name: str, sessions: int, mode: str, waves: Sequence[Wave]) -> LoadRow:
    gaps = [gap for wave in waves for gap in wave.gaps_ms]
    return LoadRow(
        target=name,
        sessions=sessions,
        mode=mode,
        waves=len(waves),
        tokens_per_second=statistics.median(wave.tokens_per_second for wave in waves),
        p50_gap_ms=float(np.percentile(gaps, 50)),
        p99_gap_ms=float(np.percentile(gaps, 99)),
        slowest_ms_per_token=statistics.median(wave.slowest_ms for wave in waves),
        tokens_per_round=1 + sum(wave.accepted for wave in waves) / sum(wave.rounds for wave in waves),
    )


@asynccontextmanager
async def clients_of(services: ModelServices) -> AsyncIterator[Mapping[str, AsyncClient]]:
    """A client for each mode; auto learns on a coordinator that serves it alone."""
    async with AsyncExitStack() as stack:
        fixed = stack.enter_context(services.coordinator("fixed", {"fan_out": FAN_OUT}))
        auto = stack.enter_context(services.coordinator("auto", {}))
        addresses = {"on": fixed, "off": fixed, "auto": auto}
        yield {mode: await stack.enter_async_context(AsyncClient(address)) for mode, address in addresses.items()}


async def run(plan: LoadPlan, folder: Path, advance: Advance) -> LoadResults:
    """Every target at every concurrency."""
    rows: list[LoadRow] = []
    comparisons: list[Comparison] = []
    for number, (name, pair) in enumerate(PAIRS.items()):
        with ModelServices.of(folder / str(number), pair) as services:
            async with clients_of(services) as clients:
                for sessions in plan.sessions:
                    found, comparison = await measure(clients, name, sessions, plan.waves, plan.tokens)
                    rows += found
                    comparisons.append(comparison)
                    advance(f"{sessions} sessions, {name}")
    return LoadResults(tuple(comparisons), tuple(rows))


def measure_load(plan: LoadPlan, out: Path, name: str) -> Path:
    """Run the plan on services of its own; returns the report."""
    with measuring("concurrencies", len(plan)) as (folder, advance):
        results = asyncio.run(run(plan, folder, advance))
    facts = describe() | plan.facts
    return write_report(out, name, facts, asdict(results), results.markdown(), results.plots())


def comparison_row(each: Comparison) -> dict[str, object]:
    """One line of the first table."""
    return {
        "target": each.target,
        "sessions": each.sessions,
        "auto over the better of on and off": each.over_best,
        "lower bound": each.over_best_lower,
        "bar": verdict(each.over_best_lower, BAR) if each.sessions == BAR_SESSIONS else "",
        "its slowest request over target-only's": each.slowest_over_off,
        "lower bound of that": each.slowest_over_off_lower,
        "guarantee": verdict(each.slowest_over_off_lower, BAR),
    }


def load_plot(target: str, rows: Sequence[LoadRow]) -> Plot:
    """Tokens per second of every mode by concurrency, for one target."""
    mine = {(row.mode, row.sessions): row.tokens_per_second for row in rows if row.target == target}
    counts = sorted({sessions for _, sessions in mine})
    bars = [Bars(mode, [Spread.of([mine[mode, count]]) for count in counts]) for mode in MODES]
    return Plot(f"Load: {target}", "tokens per second", [str(count) for count in counts], bars)
