"""The first request of a fresh service.

    python -m paceline_lab.bench.fresh_service qwen2.5-coder-1.5b --out docs/reports

Services start, and the first text that they write is a request under `auto`: no acceptance is known, and no round
has been timed. Other prompts follow until the planner knows its drafts. Then the first request runs again under
`auto` and target-only, twice each, in an order of its own. Each start has a prompt of its own, at one temperature.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO
from paceline.protocol.records import GenerationStats
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.stopping import signals_interrupt
from paceline_lab import REPORTS
from paceline_lab.bench.prompts import Prompt, load_prompts
from paceline_lab.bench.speed.groups import GenerationRunner, MeasuredServices, start_groups
from paceline_lab.reporting.figures import Spread
from paceline_lab.reporting.presentation import markdown_table, spread_text, verdict
from paceline_lab.reporting.progress import stderr_console
from paceline_lab.reporting.reports import load_average, write_rows

KINDS = ("code", "sql", "chat")
TOKENS, LEARNED = 128, 64
"""Of a request; and those after which a fresh service should run as a settled one."""
SETTLING = 3
"""Requests between the first and its repetitions."""
BAR, BAR_LEARNED = 0.97, 0.9


@dataclass(frozen=True)
class FirstRequest:
    """One start's; tokens per second after the first round, of the repetitions their median.

    Attributes:
        fresh, settled: under `auto`, as the very first request and later.
        plain, noise: target-only later; its slower run over its faster one.
        fresh_late, settled_late: of the tokens behind the first 64.
    """

    kind: str
    prompt: str
    temperature: float
    fresh: float
    settled: float
    plain: float
    noise: float
    fresh_late: float
    settled_late: float


def decode_rate(stats: GenerationStats, behind: int = 0) -> float:
    """Tokens per second of the rounds after the first, or after the first that ends so many tokens."""
    ends = list(itertools.accumulate(record.accepted + 1 for record in stats.records))
    records = [record for record, end in zip(stats.records[1:], ends, strict=False) if end >= behind]
    took_s = sum(record.round_ms for record in records) / 1e3
    return sum(record.accepted + 1 for record in records) / took_s if took_s > 0 else 0.0


def measure_start(
    runner: GenerationRunner, prompt: Prompt, temperature: float, others: Sequence[Prompt]
) -> FirstRequest:
    """Measure services that have served nothing yet.

    Raises:
        PacelineError: as the services sent it.
    """
    auto, off = SpeculationSettings(drafter=AUTO), SpeculationSettings(off=True)

    def run(of: Prompt, speculation: SpeculationSettings) -> GenerationStats:
        return runner.generate(_request(of, temperature, speculation)).stats

    first = run(prompt, auto)
    for other in others:
        run(other, auto)
    order = [auto, off, auto, off]
    random.Random(f"{prompt.name} {temperature}").shuffle(order)  # noqa: S311 - an order, no secret
    again = [(speculation, run(prompt, speculation)) for speculation in order]
    settled = [stats for speculation, stats in again if speculation is auto]
    plain = [decode_rate(stats) for speculation, stats in again if speculation is off]
    return FirstRequest(
        prompt.kind,
        prompt.name,
        temperature,
        fresh=decode_rate(first),
        settled=_median(settled, decode_rate),
        plain=Spread.of(plain).median,
        noise=min(plain) / max(plain),
        fresh_late=decode_rate(first, LEARNED),
        settled_late=_median(settled, lambda stats: decode_rate(stats, LEARNED)),
    )


def _median(runs: Sequence[GenerationStats], rate: Callable[[GenerationStats], float]) -> float:
    return Spread.of([rate(stats) for stats in runs]).median


def _request(prompt: Prompt, temperature: float, speculation: SpeculationSettings) -> GenerateRequest:
    return GenerateRequest(
        messages=prompt.chats[0],
        sampling=SamplingParams(temperature=temperature).stated(),
        seed=1,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        speculation=speculation,
    )


def starts(prompts: Mapping[str, Sequence[Prompt]], count: int) -> Iterator[tuple[Prompt, float, Sequence[Prompt]]]:
    """So many (prompt, temperature, other prompts of all kinds), kinds and temperatures in turns."""
    kinds = list(prompts)
    for number in range(count):
        kind, turn = kinds[number % len(kinds)], number // len(kinds)
        of_kind = prompts[kind]
        others = [prompts[each][(turn + 1) % len(prompts[each])] for each in kinds]
        yield of_kind[turn % len(of_kind)], (0.0, 0.8)[(number % len(kinds) + turn) % 2], others[:SETTLING]


def run_starts(services: MeasuredServices, count: int, console: Console) -> Iterator[FirstRequest]:
    """Start services so many times, each for one first request."""
    for prompt, temperature, others in starts(load_prompts(KINDS), count):
        with (
            tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
            start_groups(services, [AUTO], Path(folder)) as groups,
        ):
            row = measure_start(groups[AUTO], prompt, temperature, others)
        console.print(f"{row.kind} T={row.temperature:g}: {row.fresh / row.plain:.2f} × target-only", style="dim")
        yield row


def table(rows: Sequence[FirstRequest]) -> str:
    """Each start, and the medians beside their bars."""
    columns = [
        {
            "kind": row.kind,
            "prompt": row.prompt,
            "T": row.temperature,
            "target-only tok/s": f"{row.plain:.2f}",
            "noise": f"{row.noise:.2f}",
            "first ÷ target-only": f"{row.fresh / row.plain:.2f}",
            "settled ÷ target-only": f"{row.settled / row.plain:.2f}",
            "first ÷ settled behind 64 tokens": f"{row.fresh_late / row.settled_late:.2f}",
        }
        for row in rows
    ]
    fresh = Spread.of([row.fresh / row.plain for row in rows])
    late = Spread.of([row.fresh_late / row.settled_late for row in rows])
    return "\n".join(
        [
            f"- first request ÷ target-only: {spread_text(fresh, 2)}; its least {verdict(fresh.low, BAR)}",
            f"- first ÷ settled, behind {LEARNED} tokens: {spread_text(late, 2)}; its median "
            f"{verdict(late.median, BAR_LEARNED)}",
            "",
            markdown_table(columns),
        ]
    )


@signals_interrupt()
def main() -> None:
    """Run, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--quantization", default="")
    parser.add_argument("--out", type=Path, default=REPORTS)
    arguments = parser.parse_args()
    load = load_average()
    services = MeasuredServices(arguments.model, quantization=arguments.quantization)
    rows = list(run_starts(services, arguments.starts, stderr_console()))
    settings = {"model": arguments.model, "load average before": load}
    print(write_rows(arguments.out, "fresh-service", settings, rows, table(rows)))


if __name__ == "__main__":
    main()
