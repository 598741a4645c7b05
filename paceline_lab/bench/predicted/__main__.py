"""Predicted tokens a round and speeds beside served ones, every cell in a report.

    python -m paceline_lab.bench.predicted smollm2-135m --drafter default --kind chat,code-edit --k 1,2,4
    python -m paceline_lab.bench.predicted qwen2.5-coder-1.5b --drafter qwen2.5-coder-0.5b --kind code

Passes and times come first, while nothing is served: prediction knows the prompts, not the answers' seeds (greedy
answers have none: those are read as they will be served). Then the services run every setting in turns with a fixed
length and no outcome drafting, which is what is predicted.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from paceline.runtime.config import DEFAULT_MODEL, EngineSettings
from paceline_lab import REPORTS
from paceline_lab.bench.predicted.cells import GridCell, summary_rows
from paceline_lab.bench.predicted.grid import GridOptions, cells_of, predict_grid, serve_grid, settings_of
from paceline_lab.bench.predicted.serving import grid_services
from paceline_lab.bench.prompts import load_prompts
from paceline_lab.plan.options import PlanOptions, drafters_named
from paceline_lab.predict.rounds import ProposalShape
from paceline_lab.predict.sample import SampleOptions
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.progress import progress_bar, stderr_console
from paceline_lab.reporting.reports import describe, load_average, write_report

UNSEEN_SEED = 9001
"""Seed of the texts that prediction reads; requests have seeds from 0 on."""
NOTES = """
Served: rounds behind the first of each request, the last cut by the answer's end, ± one standard error as if rounds
were independent. Predicted tokens: ± one standard error over texts. `speed off by` is predicted ÷ served tokens per
second - 1 with the lines that the services stated while they ran; `by lines from before` with lines measured in one
process before they started; both with ways of 1 ms to each service. `by its own rounds` has steps and ways of the
cell's own records, so what is off is the formula. `gain off by` is the predicted speed-up over target-only ÷ the
served one, less 1.
"""


def main() -> None:
    """Predict, serve, compare, and write the report."""
    args = _arguments()
    until = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    facts = describe() | {"load average before": load_average(), "target": args.target}
    facts |= {"seeds": f"requests 0 on, texts that were read {UNSEEN_SEED}"}
    with tempfile.TemporaryDirectory(prefix="paceline-predicted-") as folder:
        options = _options(args, Path(folder))
        console = stderr_console()
        with progress_bar(console, "texts are read", len(options.prompts) * len(args.temperature)) as advance:
            predictions, times = predict_grid(options, advance)
        steps = options.turns * len(list(settings_of(options, predictions)))
        with (
            grid_services(args.target, options.plan.drafters, Path(folder), args.cores) as services,
            progress_bar(console, "requests are served", steps) as advance,
        ):
            for runs in serve_grid(options, services, predictions, advance):
                _write(args, facts, cells_of(runs, predictions, times))
                if time.monotonic() > until:
                    break
    print(f"written: {args.out}")


def _write(args: argparse.Namespace, facts: dict[str, str], cells: list[GridCell]) -> None:
    """Write the report so far, so that a run that is cut short has one."""
    if cells:
        write_report(args.out, args.name, facts, {"cells": [asdict(cell) for cell in cells]}, report_text(cells))


def report_text(cells: list[GridCell]) -> str:
    """Write the report's text: title, summary, every cell."""
    rows = markdown_table([cell.row() for cell in cells])
    return f"# Predicted against served\n{NOTES}\n{markdown_table(summary_rows(cells))}\n## Every cell\n\n{rows}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m paceline_lab.bench.predicted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", action="append", default=[], help="as `paceline plan` has it; repeatable")
    parser.add_argument("--kind", default="chat,code,code-edit", help="kinds of prompts, with commas between")
    parser.add_argument("--prompts", type=int, default=4, help="first prompts of each kind")
    parser.add_argument("--temperature", type=_numbers, default=(0.0, 0.8), help="with commas between")
    parser.add_argument("--k", default="1,2,4,8", help="as `paceline plan` has it")
    parser.add_argument("--sessions", default="1", help="requests at once, with commas between")
    parser.add_argument("--requests", type=int, default=4, help="of each cell")
    parser.add_argument("--tokens", type=int, default=96, help="most of each answer")
    parser.add_argument("--repeats", type=int, default=2, help="draws of each prompt that are read, above T = 0")
    parser.add_argument("--turns", type=int, default=2, help="in which they are served, all cells in each")
    parser.add_argument("--minutes", type=float, default=0.0, help="end behind the turn that is served then; 0: all")
    parser.add_argument("--threads", type=int, default=0, help="of the passes and of the lines measured before")
    parser.add_argument("--cores", help="of the services, as `paceline serve --cores`")
    parser.add_argument("--name", default="predicted", help="of the report")
    parser.add_argument("--out", type=Path, default=REPORTS)
    return parser.parse_args()


def comma_parts(text: str) -> list[str]:
    """Return the parts of an option that has commas between."""
    return [part for part in text.split(",") if part]


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in comma_parts(text))


def _options(args: argparse.Namespace, folder: Path) -> GridOptions:
    prompts = {kind: each[: args.prompts] for kind, each in load_prompts(comma_parts(args.kind)).items()}
    most = max(map(len, prompts.values())) * args.repeats
    sample = SampleOptions(Path(args.kind), args.temperature, most, args.tokens, UNSEEN_SEED)
    plan = PlanOptions(
        target=args.target,
        sample=sample,
        out=folder,
        drafters=drafters_named(args.drafter, args.target),
        shapes=tuple(ProposalShape.parse(each) for each in comma_parts(args.k)),
        loads=tuple(int(each) for each in comma_parts(args.sessions)),
        engine=EngineSettings(threads=args.threads),
    )
    return GridOptions(plan, prompts, args.requests, args.tokens, args.repeats, args.turns)


if __name__ == "__main__":
    main()
