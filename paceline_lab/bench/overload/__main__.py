"""Ten times as many requests as there is room for, for minutes.

    python -m paceline_lab.bench.overload --out docs/reports

A simulated target, a coordinator with few places and a gateway, in processes of their own. First as many users as
there are places ask one request after the other, half of them over gRPC and half over HTTP: that is 1 ×. Then ten
times what was served comes at random, and nobody tries again. Then it is as before. Texts are compared with what the
same requests say alone. The run fails where one was lost or changed, or a refusal had no hint.

`recovered` is the time from the storm's end to the last refusal behind it. Memory is what each process holds; its
growth a minute, over the second half of the storm, is Theil and Sen's estimate with its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import uvloop

from paceline.runtime.process import signals_interrupt
from paceline_lab import REPORTS
from paceline_lab.bench.overload.run import (
    AFTER,
    NORMAL,
    STORM,
    OverloadPlan,
    OverloadRun,
    Phase,
    overload,
    overload_services,
)
from paceline_lab.bench.resources import KINDS, Samples
from paceline_lab.bench.users import GRPC, HTTP, RequestOutcome, UserRequest
from paceline_lab.reporting.figures import percentile
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, load_average, write_report

MEMORY = KINDS[0]


def main_plan(minutes: float, places: int, seed: int) -> OverloadPlan:
    """Return the plan that the command runs."""
    return OverloadPlan(places=places, storm_s=60 * minutes, seed=seed)


def row(phase: Phase, protocol: str) -> dict[str, object]:
    """Return the table's row of one phase over one protocol."""
    answers, refusals = phase.of(RequestOutcome.SERVED, protocol), phase.of(RequestOutcome.REFUSED, protocol)
    gaps = [gap for each in answers for gap in each.gaps_ms]
    hints = [each.hint_ms for each in refusals if each.hint_ms is not None]
    return {
        "load": phase.name,
        "way": protocol,
        "requests a second": f"{sum(each.protocol == protocol for each in phase.requests) / phase.seconds:.1f}",
        "served": len(answers),
        "refused": len(refusals),
        "lost": len(phase.of(RequestOutcome.LOST, protocol)),
        "changed": len(phase.of(RequestOutcome.CHANGED, protocol)),
        "between tokens p50 ms": _percentile_text(gaps, 50),
        "p99": _percentile_text(gaps, 99),
        "first token p50 ms": _percentile_text([each.first_ms for each in answers], 50),
        "its p99": _percentile_text([each.first_ms for each in answers], 99),
        "refusal p50 ms": _percentile_text([each.refusal_ms for each in refusals], 50),
        "refusal p99": _percentile_text([each.refusal_ms for each in refusals], 99),
        "hints ms": f"{min(hints):.0f} to {max(hints):.0f}" if hints else "–",
    }


def _percentile_text(values: Sequence[float], percent: float) -> str:
    return f"{percentile(values, percent):.1f}" if values else "–"


def over(run: OverloadRun, percent: float, phase: str) -> float:
    """Return the time between tokens in a phase over that at 1 ×, of both protocols together."""
    normal_ms, phase_ms = (
        [gap for each in run.phases[name].of(RequestOutcome.SERVED) for gap in each.gaps_ms]
        for name in (NORMAL, phase)
    )
    return percentile(phase_ms, percent) / max(1e-9, percentile(normal_ms, percent))


def figures(run: OverloadRun) -> dict[str, object]:
    """Return the figures of the whole run, which are what the service promises."""
    storm = run.phases[STORM]
    served_a_second = len(storm.of(RequestOutcome.SERVED)) / storm.seconds
    return {
        "capacity, requests a second": run.capacity,
        "came in the storm, times that": len(storm.requests) / storm.seconds / run.capacity,
        "served in the storm, of the capacity": served_a_second / run.capacity,
        "between tokens in the storm ÷ at 1 ×, p50": over(run, 50, STORM),
        "the same, p99": over(run, 99, STORM),
        "between tokens behind the storm ÷ before, p50": over(run, 50, AFTER),
        "refusals without a hint": len(refusals_without_hint(run)),
        "recovered, seconds": run.recovery_s,
    }


def refusals_without_hint(run: OverloadRun) -> list[UserRequest]:
    """Return refusals that don't say when to come again."""
    return [each for phase in run.phases.values() for each in phase.of(RequestOutcome.REFUSED) if not each.hint_ms]


def memory(label: str, samples: Samples, ends_s: dict[str, float]) -> dict[str, object]:
    """Return the table's row of one process: memory, descriptors and threads."""
    before = samples.between(0.0, ends_s[NORMAL])
    storm = samples.between(ends_s[NORMAL], ends_s[STORM])
    half = samples.between((ends_s[NORMAL] + ends_s[STORM]) / 2, ends_s[STORM])
    return {
        "process": label,
        "MiB at 1 ×": f"{before.most(MEMORY):.1f}",
        "most in the storm": f"{storm.most(MEMORY):.1f}",
        "growth a minute, second half": str(half.drift(MEMORY)),
        "descriptors at most": f"{storm.most('descriptors'):.0f}",
        "threads at most": f"{storm.most('threads'):.0f}",
    }


def text_of(run: OverloadRun) -> str:
    """Write the report's text, which stands behind its facts."""
    rows = [row(phase, protocol) for phase in run.phases.values() for protocol in (GRPC, HTTP)]
    promises = [{"what": name, "value": value} for name, value in figures(run).items()]
    memory_rows = [memory(label, samples, run.ends_s) for label, samples in run.resources.items()]
    return f"# Overload\n\n{markdown_table(rows)}\n{markdown_table(promises)}\n{markdown_table(memory_rows)}"


def failures(run: OverloadRun) -> list[str]:
    """Say in words what went wrong: each request lost or changed, and each refusal without a hint."""
    outcomes = RequestOutcome.LOST, RequestOutcome.CHANGED
    errors = [each for phase in run.phases.values() for outcome in outcomes for each in phase.of(outcome)]
    lines = [f"{each.protocol} {each.outcome} {each.why}" for each in errors]
    return [*lines, *("a refusal without a hint" for _ in refusals_without_hint(run))]


@signals_interrupt()
def main() -> None:
    """Run, write the report, and fail on what must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="Of the storm.")
    parser.add_argument("--places", type=int, default=16, help="Requests that the coordinator runs at once.")
    parser.add_argument("--seed", type=int, default=1, help="Of when requests come.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    arguments = parser.parse_args()
    plan, before = main_plan(arguments.minutes, arguments.places, arguments.seed), load_average()
    with (
        tempfile.TemporaryDirectory() as folder,
        overload_services(Path(folder), plan) as services,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        run = runner.run(overload(services, plan))
    facts = {name: str(value) for name, value in asdict(plan).items()}
    facts["load average"] = f"{before} before, {load_average()} after"
    values = {"figures": figures(run), "samples": {label: asdict(each) for label, each in run.resources.items()}}
    report = write_report(arguments.out, "overload", describe() | facts, values, text_of(run))
    print(report.read_text())
    assert not failures(run), "; ".join(failures(run)[:8])


if __name__ == "__main__":
    main()
