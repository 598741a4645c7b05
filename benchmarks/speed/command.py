"""`paceline bench speed`: services started, every pair run, the report written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks.reporting.progress import progress_bar, stderr_console
from benchmarks.reporting.reports import describe, load_average, write_report
from benchmarks.speed.groups import ServiceGroup, connect, start_groups
from benchmarks.speed.report import TargetStepCosts, speed_json, speed_markdown, speed_plots, speed_rows
from benchmarks.speed.run import SpeedPair, SpeedPlan, Variant, run_speed
from paceline.models.resolve import resolve
from paceline.runtime.config import NOT_QUANTIZED


def measure_speed(
    model: str, plan: SpeedPlan, url: str | None, out: Path, name: str, quantization: str = NOT_QUANTIZED
) -> Path:
    """Run the plan on services of its own, or on the coordinator at `url`; returns the report.

    What was measured before a failure or Ctrl-C is reported too.
    """
    console = stderr_console()
    with running_groups(model, plan.drafters, url, console, quantization) as groups:
        facts = _facts(model, plan, groups) | {"quantization": quantization}
        done: list[SpeedPair] = []
        try:
            with progress_bar(console, "pairs", len(plan)) as advance:

                def note(pair: SpeedPair) -> None:
                    done.append(pair)
                    advance(f"{pair.turn.prompt.kind} T={pair.turn.temperature:g} {pair.turn.variant.name}")

                run_speed(plan, groups, note)
        finally:
            if done:
                costs = TargetStepCosts.of(done, groups)
                rows = speed_rows(done, costs)
                text, values = speed_markdown(rows, costs), speed_json(rows, done, costs)
                report = write_report(out, name, facts, values, text, speed_plots(rows))
    return report


def _facts(model: str, plan: SpeedPlan, groups: Mapping[str, ServiceGroup]) -> dict[str, str]:
    return describe() | {
        "model": model,
        "pairs of each row": str(plan.pairs),
        "tokens of each generation": str(plan.tokens),
        "compute threads": "; ".join(f"{Variant(name).name}: {group.split}" for name, group in groups.items()),
        "load average before": load_average(),
    }


@contextmanager
def running_groups(
    model: str, drafters: Sequence[str], url: str | None, console: Console, quantization: str = NOT_QUANTIZED
) -> Iterator[dict[str, ServiceGroup]]:
    """A group of services for each drafter, started here or found at `url`."""
    if url is not None:
        with connect(url, drafters) as groups:
            yield groups
        return
    resolve(model)

    def announce(line: str) -> None:
        console.print(line, style="dim")

    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        start_groups(model, drafters, Path(folder), announce, quantization) as groups,
    ):
        yield groups
