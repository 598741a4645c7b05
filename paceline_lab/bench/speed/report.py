"""From pairs to the figures of `bench speed`, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.protocol.proposal import NONE
from paceline_lab.bench.speed.groups import GenerationRunner
from paceline_lab.bench.speed.run import SpeedPair, SpeedRun
from paceline_lab.reporting.figures import RowCosts, Spread, ceiling, lower_bound, percentile
from paceline_lab.reporting.presentation import Bars, Plot, markdown_table, spread_text


@dataclass(frozen=True)
class TargetStepCosts:
    """What target steps cost, by compute threads and rows."""

    by_threads: Mapping[int, RowCosts]
    fastest: int
    drafting: Mapping[str, int]
    """Drafter → compute threads of its target."""

    @classmethod
    def of(cls, pairs: Sequence[SpeedPair], groups: Mapping[str, GenerationRunner]) -> TargetStepCosts:
        """Fold every step of every run by the threads that computed it."""
        steps: dict[int, list[tuple[int, float]]] = {}
        fastest = groups[NONE].target_threads
        drafting = {name: group.target_threads for name, group in groups.items()}
        for pair in pairs:
            threads = drafting[pair.turn.variant.drafter]
            steps.setdefault(fastest, []).extend(pair.plain.steps)
            for run in (pair.drafted, pair.split):
                steps.setdefault(threads, []).extend(run.steps if run else ())
        return cls({threads: RowCosts.of(taken) for threads, taken in steps.items()}, fastest, drafting)

    @property
    def single_row_ms(self) -> float:
        """t(1) of our fastest target-only."""
        return self.by_threads[self.fastest].at(1)

    def ceiling(self, runs: Sequence[SpeedRun], threads: int) -> float:
        """What `runs` could gain over our fastest target-only if their target had `threads`; 0: rows not measured."""
        rows = [rows for run in runs for rows, _ in run.steps]
        costs = self.by_threads.get(threads)
        if costs is None or not costs.covers(rows):
            return 0.0
        tokens = sum(len(run.token_ids) for run in runs)
        return ceiling(tokens / len(rows), self.single_row_ms, costs.mean(rows))


@dataclass(frozen=True)
class SpeedRow:
    """One kind, temperature and variant.

    Attributes:
        plain, split, drafted: tokens per second after the first round: our fastest target-only, target-only at
            the variant's own thread split, the variant. `split` counts 0 where it is the fastest's own.
        ratio: drafted ÷ plain of each pair whose answers are long enough to have a speed; `ratio_lower` bounds its
            median from below with 95 % confidence.
        request_ratio: whole requests, prompt included.
        ceiling: the ratio at no cost of drafting and coordination, at the variant's own split;
            `ceiling_all_cores`: if its target had every core. 0: unknown.
        acceptance: accepted ÷ proposed; mean_accepted_length: 1 + accepted ÷ rounds.
        hit_rate: cache hits ÷ rounds that carried a proposal; `hit_rate_all`: ÷ all rounds.
        differences: (prompt, pass, token) where a text that had to be target-only's first differed.
        texts_compared: pairs whose texts had to be equal.
    """

    kind: str
    temperature: float
    variant: str
    pairs: int
    tokens: int
    plain: Spread
    split: Spread
    drafted: Spread
    ratio: Spread
    ratio_lower: float
    split_ratio: Spread
    request_ratio: Spread
    request_ratio_lower: float
    ceiling: float
    ceiling_all_cores: float
    acceptance: float
    mean_accepted_length: float
    tokens_per_round: float
    hit_rate: float
    hit_rate_all: float
    first_token_ms: Spread
    plain_first_token_ms: Spread
    output_token_ms: Spread
    plain_output_token_ms: Spread
    draft_wait_ms_p50: float
    draft_wait_ms_p99: float
    verify_ms_p50: float
    verify_ms_p99: float
    plain_verify_ms_p50: float
    texts_compared: int
    differences: tuple[tuple[str, int, int], ...]

    @property
    def ceiling_share(self) -> float:
        """ratio ÷ ceiling; 0 where the ceiling is unknown."""
        return self.ratio.median / self.ceiling if self.ceiling else 0.0


def speed_rows(pairs: Sequence[SpeedPair], costs: TargetStepCosts) -> list[SpeedRow]:
    """One row for each kind, temperature and variant, in the order in which they first ran."""
    cells: dict[tuple[str, float, str], list[SpeedPair]] = {}
    for pair in pairs:
        turn = pair.turn
        cells.setdefault((turn.prompt.kind, turn.temperature, turn.variant.name), []).append(pair)
    return [_row(*key, cell, costs) for key, cell in cells.items()]


def _row(kind: str, temperature: float, variant: str, pairs: Sequence[SpeedPair], costs: TargetStepCosts) -> SpeedRow:
    drafted, plain = [pair.drafted for pair in pairs], [pair.plain for pair in pairs]
    split = [pair.split for pair in pairs if pair.split]
    threads = costs.drafting[pairs[0].turn.variant.drafter]
    compared = [pair for pair in pairs if pair.turn.same_text]
    measured = [pair for pair in pairs if pair.is_measured]
    return SpeedRow(
        kind=kind,
        temperature=temperature,
        variant=variant,
        pairs=len(pairs),
        tokens=sum(len(run.token_ids) for run in drafted),
        plain=_speeds(plain),
        split=_speeds(split),
        drafted=_speeds(drafted),
        ratio=Spread.of([pair.ratio for pair in measured]),
        ratio_lower=lower_bound([pair.ratio for pair in measured]),
        split_ratio=Spread.of([pair.split_ratio for pair in measured]),
        request_ratio=Spread.of([pair.request_ratio for pair in pairs]),
        request_ratio_lower=lower_bound([pair.request_ratio for pair in pairs]),
        ceiling=costs.ceiling(drafted, threads),
        ceiling_all_cores=costs.ceiling(drafted, costs.fastest),
        **_drafting_figures(drafted),
        **_latencies(drafted, plain),
        texts_compared=len(compared),
        differences=tuple(
            (pair.turn.prompt.name, pair.turn.number, pair.difference)
            for pair in compared
            if pair.difference is not None
        ),
    )


def _speeds(runs: Sequence[SpeedRun]) -> Spread:
    return Spread.of([run.tokens_per_second for run in runs if run.tokens_per_second > 0])


def _drafting_figures(runs: Sequence[SpeedRun]) -> dict[str, Any]:
    def total(figure: Callable[[SpeedRun], int]) -> int:
        return sum(figure(run) for run in runs)

    rounds, hits = max(1, total(lambda run: run.rounds)), total(lambda run: run.cache_hits)
    accepted = total(lambda run: run.accepted)
    return {
        "acceptance": accepted / max(1, total(lambda run: run.proposed)),
        "mean_accepted_length": 1 + accepted / rounds,
        "tokens_per_round": total(lambda run: len(run.token_ids)) / rounds,
        "hit_rate": hits / max(1, total(lambda run: run.spec_rounds)),
        "hit_rate_all": hits / rounds,
    }


def _latencies(drafted: Sequence[SpeedRun], plain: Sequence[SpeedRun]) -> dict[str, Any]:
    waits = [wait for run in drafted for wait in run.draft_wait_ms]
    verifies = [taken for run in drafted for taken in run.verify_ms]
    return {
        "first_token_ms": Spread.of([first for run in drafted for first in run.first_token_ms]),
        "plain_first_token_ms": Spread.of([first for run in plain for first in run.first_token_ms]),
        "output_token_ms": Spread.of(_output_token_ms(drafted)),
        "plain_output_token_ms": Spread.of(_output_token_ms(plain)),
        "draft_wait_ms_p50": percentile(waits, 50),
        "draft_wait_ms_p99": percentile(waits, 99),
        "verify_ms_p50": percentile(verifies, 50),
        "verify_ms_p99": percentile(verifies, 99),
        "plain_verify_ms_p50": percentile([taken for run in plain for taken in run.verify_ms], 50),
    }


def _output_token_ms(runs: Sequence[SpeedRun]) -> list[float]:
    return [1e3 / run.tokens_per_second for run in runs if run.tokens_per_second > 0]


def speed_json(rows: Sequence[SpeedRow], pairs: Sequence[SpeedPair], costs: TargetStepCosts) -> dict[str, Any]:
    """Everything that the Markdown says, and each pair's own figures."""
    return {
        "row_costs_ms": {
            str(threads): {str(rows): round(taken, 3) for rows, taken in of.median_ms.items()}
            for threads, of in costs.by_threads.items()
        },
        "results": [asdict(row) | {"ceiling_share": row.ceiling_share} for row in rows],
        "pairs": [_pair_json(pair) for pair in pairs],
    }


def _pair_json(pair: SpeedPair) -> dict[str, Any]:
    turn = pair.turn
    runs = {"plain": pair.plain, "drafted": pair.drafted} | ({"split": pair.split} if pair.split else {})
    figures = ("wall_s", "first_token_ms", "tokens_per_second", "rounds", "proposed", "accepted", "cache_hits")
    return {
        "kind": turn.prompt.kind,
        "prompt": turn.prompt.name,
        "temperature": turn.temperature,
        "variant": turn.variant.name,
        "seed": turn.seed,
        "drafted_first": turn.backwards,
        "first_difference": pair.difference,
        "runs": {name: {figure: getattr(run, figure) for figure in figures} for name, run in runs.items()},
    }


def speed_plots(rows: Sequence[SpeedRow]) -> list[Plot]:
    """Speed-ups with their ceilings, a plot for each temperature."""
    plots = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        cells = {(row.kind, row.variant): row for row in rows if row.temperature == temperature}
        kinds, variants = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
        bars = []
        for variant in variants:
            found = [cells.get((kind, variant)) for kind in kinds]
            marks = [row.ceiling if row else None for row in found]
            bars.append(Bars(variant, [row.ratio if row else None for row in found], marks))
        title = f"Speed-up over target-only, temperature {temperature:g} (dashed: ceiling)"
        plots.append(Plot(title, "times target-only", kinds, bars, line=1.0))
    return plots


NOTES = """\
Target-only is our fastest: every core, drafting off. Speed-ups are of tokens per second after the first round's
tokens, each within one interleaved pair; `whole request` includes the prompt. The bound is of the median, one-sided,
by bootstrap over pairs. The ceiling is E[tokens] · t(1) / t(k + 1) from this run's own steps: what the same proposals
and acceptances would gain if drafting and coordination cost nothing.
"""


def speed_markdown(rows: Sequence[SpeedRow], costs: TargetStepCosts) -> str:
    """The report."""
    parts = ["# Speed beside target-only", markdown_table([_main_line(row) for row in rows])]
    split = [_split_line(row) for row in rows if row.split.count]
    if split:
        parts += ["## Target-only at the drafter's own thread split\n", markdown_table(split)]
    parts += ["## Rounds\n", markdown_table([_rounds_line(row) for row in rows])]
    parts += ["## Target steps by rows, median ms\n", _costs_table(costs)]
    parts += [_differences(rows), NOTES]
    return "\n".join(part for part in parts if part)


def _key(row: SpeedRow) -> dict[str, object]:
    return {"kind": row.kind, "T": f"{row.temperature:g}", "drafter": row.variant}


def _main_line(row: SpeedRow) -> dict[str, object]:
    equal = row.texts_compared - len(row.differences)
    return _key(row) | {
        "target-only tok/s": f"{row.plain.median:.1f}",
        "drafted tok/s (min to max)": spread_text(row.drafted),
        "speed-up (min to max)": spread_text(row.ratio, 2),
        "lower 95 %": f"{row.ratio_lower:.2f}",
        "whole request": f"{row.request_ratio.median:.2f}",
        "ceiling": f"{row.ceiling:.2f}" if row.ceiling else "?",
        "of it": f"{row.ceiling_share:.0%}" if row.ceiling else "?",
        "same text": f"{equal} of {row.texts_compared}" if row.texts_compared else "only the distribution",
    }


def _split_line(row: SpeedRow) -> dict[str, object]:
    return _key(row) | {
        "all cores tok/s": f"{row.plain.median:.1f}",
        "split tok/s": spread_text(row.split),
        "speed-up over the split": spread_text(row.split_ratio, 2),
        "ceiling with all cores": f"{row.ceiling_all_cores:.2f}" if row.ceiling_all_cores else "?",
    }


def _rounds_line(row: SpeedRow) -> dict[str, object]:
    first, plain_first = row.first_token_ms.median, row.plain_first_token_ms.median
    token, plain_token = row.output_token_ms.median, row.plain_output_token_ms.median
    return _key(row) | {
        "acceptance": f"{row.acceptance:.2f}",
        "accepted length": f"{row.mean_accepted_length:.2f}",
        "hits of drafted / of all rounds": f"{row.hit_rate:.0%} / {row.hit_rate_all:.0%}",
        "first token ms (target-only)": f"{first:.0f} ({plain_first:.0f})",
        "ms per token (target-only)": f"{token:.1f} ({plain_token:.1f})",
        "draft wait ms p50 / p99": f"{row.draft_wait_ms_p50:.2f} / {row.draft_wait_ms_p99:.1f}",
        "verify ms p50 / p99": f"{row.verify_ms_p50:.1f} / {row.verify_ms_p99:.1f}",
    }


def _costs_table(costs: TargetStepCosts) -> str:
    def line(threads: int, of: RowCosts) -> dict[str, object]:
        listed = ", ".join(f"{rows}: {taken:.1f} ({of.samples[rows]})" for rows, taken in of.median_ms.items())
        return {"threads": threads or "unknown", "rows: ms (steps)": listed}

    return markdown_table([line(*item) for item in sorted(costs.by_threads.items())])


def _differences(rows: Sequence[SpeedRow]) -> str:
    found = [
        f"- {row.kind} T={row.temperature:g} {row.variant}: prompt {prompt}, pass {number}, from token {at}\n"
        for row in rows
        for prompt, number, at in row.differences
    ]
    return "## Texts that differ from target-only's\n\n" + "".join(found) if found else ""
