"""What hiding drafting behind verification brings, on timed models: `python -m benchmarks.overlap`.

Efficiency. A run's own round records are replayed at no cost of coordination: a round whose proposal
was in the speculation cache costs T_verify, any other costs T_verify and the time that the draft
spent on its steps for it, and nothing else costs anything. Efficiency is that ideal time over the
time that the run took, from its first tokens to its last; of the perfect cache: T_verify a round.

Gain. Overlap on (fan-out 4) and off (fan-out 0) run the same requests in turn, through two
coordinators that share one target and one draft; coupled texts are equal, which is checked. The
analytic gain is `benchmarks.analytic.overlap_gain` at the hit rate that the law alone predicts and a
drafting time of k steps.

Every session is alone on its services, temperature 1, coupled, k = 4.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.analytic import expected_hit_rate, overlap_gain
from benchmarks.laws import chances, raced_ranks, table_of
from benchmarks.reporting import markdown_table, median_with_lower_bound, verdict, write_report
from benchmarks.timed import TimedPair, TimedServices, drafted, is_hit, request
from paceline.client import Client, Generation
from paceline.engine.table_spec import TableSpec
from paceline.types import GenerationStats

K = 4
FAN_OUT = 4
LAW_DRAWS = 4
GAIN_TOLERANCE = 0.95
LAW_OF_ACCEPTANCE = {0.8: "law=middling,disturb=0.655", 0.9: "law=close,disturb=0.315"}
"""Drafts whose coupled match is the key."""
EFFICIENCY_GRID = (
    (TimedPair("law=middling", 11.45, 2.54), 0.92),
    (TimedPair("law=close", 11.45, 2.54), 0.92),
    (TimedPair("law=middling", 30.0, 2.54), 0.97),
    (TimedPair("law=close", 30.0, 2.54), 0.97),
)
"""Pairs and their bars; 11.45 and 2.54 ms were measured on the best published system."""
GAIN_VERIFY_MS = (30.0, 11.45)
GAIN_SHARES = (0.5, 1.0)
"""T_draft · k over T_verify."""


@dataclass(frozen=True)
class Replay:
    """One generation after its first round, and the same rounds at no cost of coordination. Seconds."""

    rounds: int
    hits: int
    seconds: float
    ideal_seconds: float
    perfect_seconds: float


@dataclass(frozen=True)
class Efficiency:
    """One pair's row; shares of the ideal are medians over generations, with their lower 95 % bounds."""

    draft_law: str
    verify_ms: float
    draft_ms: float
    generations: int
    rounds: int
    hit_rate: float
    of_ideal: float
    of_ideal_lower: float
    of_perfect_cache: float
    tokens_per_second: float
    bar: float


@dataclass(frozen=True)
class Gain:
    """One cell of on over off: tokens a second, median over pairs, with its lower 95 % bound."""

    acceptance: float
    verify_ms: float
    draft_ms: float
    pairs: int
    expected_hit_rate: float
    hit_rate: float
    analytic: float
    gain: float
    gain_lower: float
    analytic_at_hit_rate: float


def replay(stats: GenerationStats, verify_ms: float) -> Replay:
    """Replay a generation's records at no cost of coordination.

    The first round is left out, as it is of `tokens_per_second`: it waits for both services' prefixes.

    Args:
        stats: with a record of every round.
        verify_ms: what a step of the target waits.
    """
    first, *records = stats.records
    hits = sum(is_hit(record) for record in records)
    drafting_ms = sum(record.draft.forward_ms for record in records if not is_hit(record))
    perfect_ms = verify_ms * len(records)
    return Replay(
        rounds=len(records),
        hits=hits,
        seconds=(stats.committed - first.accepted - 1) / stats.tokens_per_second,
        ideal_seconds=(perfect_ms + drafting_ms) / 1e3,
        perfect_seconds=perfect_ms / 1e3,
    )


def measure_efficiency(pair: TimedPair, bar: float, generations: int, tokens: int, folder: Path) -> Efficiency:
    """Run `generations` after one that isn't counted."""
    with (
        TimedServices(folder, pair) as services,
        services.coordinator("on", {"fan_out": FAN_OUT}) as address,
        Client(address) as client,
    ):
        runs = [client.generate(request(number, tokens, drafted(K))) for number in range(generations + 1)][1:]
    replays = [replay(run.stats, pair.verify_ms) for run in runs]
    of_ideal, lower = median_with_lower_bound([each.ideal_seconds / each.seconds for each in replays])
    of_perfect, _ = median_with_lower_bound([each.perfect_seconds / each.seconds for each in replays])
    speed, _ = median_with_lower_bound([run.stats.tokens_per_second for run in runs])
    rounds = sum(each.rounds for each in replays)
    return Efficiency(
        draft_law=pair.draft_law,
        verify_ms=pair.verify_ms,
        draft_ms=pair.draft_ms,
        generations=generations,
        rounds=rounds,
        hit_rate=sum(each.hits for each in replays) / rounds,
        of_ideal=of_ideal,
        of_ideal_lower=lower,
        of_perfect_cache=of_perfect,
        tokens_per_second=speed,
        bar=bar,
    )


def law_hit_rate(draft_law: str, k: int, fan_out: int) -> tuple[float, float]:
    """Coupled match of a law and the share of outcomes that its draft guesses, both from its tables alone."""
    target, draft = (table_of(TableSpec.parse(law)) for law in ("law=text", draft_law))
    ranks = raced_ranks(target, draft, LAW_DRAWS)
    match = float((ranks == 1).mean())
    return match, expected_hit_rate(match, k, *chances(ranks, fan_out))


def measure_gain(acceptance: float, pair: TimedPair, pairs: int, tokens: int, folder: Path) -> Gain:
    """Run interleaved pairs after one that isn't counted."""
    with (
        TimedServices(folder, pair) as services,
        services.coordinator("on", {"fan_out": FAN_OUT}) as on_address,
        services.coordinator("off", {"fan_out": 0}) as off_address,
        Client(on_address) as on,
        Client(off_address) as off,
    ):
        ran = [run_pair(on, off, number, tokens) for number in range(pairs + 1)][1:]
    gain, lower = median_with_lower_bound(
        [fast.stats.tokens_per_second / slow.stats.tokens_per_second for fast, slow in ran]
    )
    replays = [replay(fast.stats, pair.verify_ms) for fast, _ in ran]
    hit_rate = sum(each.hits for each in replays) / sum(each.rounds for each in replays)
    expected = law_hit_rate(pair.draft_law, K, FAN_OUT)[1]
    drafting_ms = K * pair.draft_ms
    return Gain(
        acceptance=acceptance,
        verify_ms=pair.verify_ms,
        draft_ms=pair.draft_ms,
        pairs=pairs,
        expected_hit_rate=expected,
        hit_rate=hit_rate,
        analytic=overlap_gain(expected, pair.verify_ms, drafting_ms),
        gain=gain,
        gain_lower=lower,
        analytic_at_hit_rate=overlap_gain(hit_rate, pair.verify_ms, drafting_ms),
    )


def run_pair(on: Client, off: Client, number: int, tokens: int) -> tuple[Generation, Generation]:
    """The same request with overlap and without.

    Raises:
        AssertionError: the texts differ.
    """
    wanted = request(number, tokens, drafted(K))
    fast, slow = on.generate(wanted), off.generate(wanted)
    if fast.token_ids != slow.token_ids:
        raise AssertionError(f"request {number}: overlap changed the text")
    return fast, slow


def efficiency_row(row: Efficiency) -> dict[str, object]:
    """One line of the first table."""
    return {
        "draft": row.draft_law,
        "T_verify ms": row.verify_ms,
        "T_draft ms": row.draft_ms,
        "rounds": row.rounds,
        "hit rate": row.hit_rate,
        "of the ideal": row.of_ideal,
        "lower bound": row.of_ideal_lower,
        "bar": verdict(row.of_ideal_lower, row.bar),
        "of a perfect cache": row.of_perfect_cache,
        "tok/s": row.tokens_per_second,
    }


def gain_row(row: Gain) -> dict[str, object]:
    """One line of the second table."""
    return {
        "acceptance": row.acceptance,
        "T_verify ms": row.verify_ms,
        "T_draft·k ms": K * row.draft_ms,
        "hit rate of the law": row.expected_hit_rate,
        "hit rate": row.hit_rate,
        "analytic gain": row.analytic,
        "gain": row.gain,
        "lower bound": row.gain_lower,
        "bar": verdict(row.gain_lower, GAIN_TOLERANCE * row.analytic),
        "analytic at the run's hit rate": row.analytic_at_hit_rate,
    }


def report(efficiencies: Sequence[Efficiency], gains: Sequence[Gain]) -> str:
    """Both tables."""
    first = markdown_table([efficiency_row(row) for row in efficiencies])
    second = markdown_table([gain_row(row) for row in gains])
    return f"## Coordination efficiency\n\n{first}\n## Overlap on over off\n\n{second}"


def main() -> None:
    """Run the grids and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=9, help="Generations, or pairs, of a cell.")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", choices=("efficiency", "gain"), help="One of the two grids.")
    parser.add_argument("--out", type=Path, default=Path("docs/reports"))
    given = parser.parse_args()
    efficiencies: list[Efficiency] = []
    gains: list[Gain] = []
    with tempfile.TemporaryDirectory() as folder:
        if given.only != "gain":
            for number, (pair, bar) in enumerate(EFFICIENCY_GRID):
                place = Path(folder) / f"efficiency-{number}"
                efficiencies.append(measure_efficiency(pair, bar, given.generations, given.tokens, place))
        if given.only != "efficiency":
            for number, (acceptance, pair) in enumerate(gain_grid()):
                place = Path(folder) / f"gain-{number}"
                gains.append(measure_gain(acceptance, pair, given.generations, given.tokens, place))
    settings = {"k": str(K), "fan-out": str(FAN_OUT), "tokens": str(given.tokens), "runs": str(given.generations)}
    print(write_report(given.out, "overlap", settings, [*efficiencies, *gains], report(efficiencies, gains)))


def gain_grid() -> list[tuple[float, TimedPair]]:
    """Acceptances and pairs of the second table."""
    return [
        (acceptance, TimedPair(law, verify_ms, share * verify_ms / K))
        for verify_ms in GAIN_VERIFY_MS
        for acceptance, law in LAW_OF_ACCEPTANCE.items()
        for share in GAIN_SHARES
    ]


if __name__ == "__main__":
    main()
