"""The first grid of `paceline bench overlap`: services beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.client import Client
from paceline_lab.bench.simulated.replay import FAN_OUT, SPECULATION, losses, pool, replay
from paceline_lab.bench.simulated.services import SimulatedPair, request
from paceline_lab.reporting.figures import Spread, median_with_lower_bound
from paceline_lab.reporting.presentation import Bars, Plot, verdict

EFFICIENCY_GRID = (
    (SimulatedPair("distribution=middling", 11.45, 2.54), 0.92),
    (SimulatedPair("distribution=close", 11.45, 2.54), 0.92),
    (SimulatedPair("distribution=middling", 30.0, 2.54), 0.97),
    (SimulatedPair("distribution=close", 30.0, 2.54), 0.97),
)
"""Pairs and their bars; 11.45 and 2.54 ms were measured on the best published system."""
VERIFY_MS = (30.0, 11.45)


@dataclass(frozen=True)
class Efficiency:
    """One pair's row; shares of the ideal are medians over generations, with their lower 95 % bounds."""

    draft_distribution: str
    verify_ms: float
    draft_ms: float
    generations: int
    rounds: int
    hit_rate: float
    self_started_rate: float
    of_ideal: float
    of_ideal_lower: float
    of_perfect_cache: float
    tokens_per_second: float
    bar: float
    echo_ms: float
    self_started_ms: float
    wire_ms: float
    target_ms: float
    deciding_ms: float
    drafting_ms: float

    @property
    def cell(self) -> tuple[float | str, ...]:
        """Return the cell's key, in the order of the table."""
        return self.verify_ms, self.draft_distribution

    @property
    def ceiling(self) -> float:
        """Return the share that nothing can pass that sends every round over gRPC, where all are hits."""
        return self.verify_ms / (self.verify_ms + self.echo_ms)


def measure_efficiency(
    pair: SimulatedPair, bar: float, echo_ms: float, generations: int, tokens: int, folder: Path
) -> Efficiency:
    """Run `generations` after one that warms up."""
    with (
        pair.services(folder, {"fan_out": FAN_OUT}) as services,
        Client(services.address) as client,
    ):
        runs = [client.generate(request(number, tokens, SPECULATION)) for number in range(generations + 1)][1:]
    replays = [replay(run.stats, pair.verify_ms) for run in runs]
    of_ideal, lower = median_with_lower_bound([each.of_ideal for each in replays])
    of_perfect, _ = median_with_lower_bound([each.of_perfect for each in replays])
    speed, _ = median_with_lower_bound([each.tokens_per_second for each in replays])
    together = pool(replays)
    round_losses = losses([record for run in runs for record in run.stats.records[1:]], pair.verify_ms)
    return Efficiency(
        draft_distribution=pair.draft_distribution,
        verify_ms=pair.verify_ms,
        draft_ms=pair.draft_ms,
        generations=generations,
        rounds=together.rounds,
        hit_rate=together.hit_rate,
        self_started_rate=together.self_started_rate,
        of_ideal=of_ideal,
        of_ideal_lower=lower,
        of_perfect_cache=of_perfect,
        tokens_per_second=speed,
        bar=bar,
        echo_ms=echo_ms,
        self_started_ms=round_losses.self_started,
        wire_ms=round_losses.wire,
        target_ms=round_losses.target,
        deciding_ms=round_losses.deciding,
        drafting_ms=round_losses.drafting,
    )


def efficiency_row(row: Efficiency) -> dict[str, object]:
    """Return a row of the first table."""
    return {
        "draft": row.draft_distribution,
        "T_verify ms": row.verify_ms,
        "T_draft ms": row.draft_ms,
        "rounds": row.rounds,
        "hit rate": row.hit_rate,
        "self-started": row.self_started_rate,
        "of the ideal": row.of_ideal,
        "lower bound": row.of_ideal_lower,
        "bar": verdict(row.of_ideal_lower, row.bar),
        "idle echo ms": row.echo_ms,
        "ceiling if all were sent": row.ceiling,
        "of a perfect cache": row.of_perfect_cache,
        "tok/s": row.tokens_per_second,
    }


def loss_row(row: Efficiency) -> dict[str, object]:
    """Return a row of the table of the losses of the first table's rounds."""
    return {
        "draft": row.draft_distribution,
        "T_verify ms": row.verify_ms,
        "self-started: beyond T_verify": row.self_started_ms,
        "sent: wire": row.wire_ms,
        "hit: target beyond T_verify": row.target_ms,
        "sent: deciding": row.deciding_ms,
        "miss: the draft beyond its steps": row.drafting_ms,
    }


def efficiency_plot(rows: Sequence[Efficiency]) -> Plot:
    """Plot shares of the ideal; the dashes are what sending every round over gRPC allows."""
    spreads = [Spread(row.of_ideal, row.of_ideal_lower, row.of_ideal, row.generations) for row in rows]
    names = [f"{row.draft_distribution.removeprefix('distribution=')}\n{row.verify_ms:g} ms" for row in rows]
    bars = Bars("achieved ÷ ideal", spreads, [row.ceiling for row in rows])
    return Plot("Coordination efficiency", "share of the ideal", names, [bars], line=1.0)
