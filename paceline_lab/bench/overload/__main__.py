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

from paceline.runtime.stopping import signals_interrupt
from paceline_lab import REPORTS
from paceline_lab.bench.overload.run import (
    AFTER,
    NORMAL,
    STORM,
    Overloading,
    OverloadPlan,
    Phase,
    overload,
    overload_services,
)
from paceline_lab.bench.resources import KINDS, Samples
from paceline_lab.bench.users import CHANGED, GRPC, HTTP, LOST, REFUSED, SERVED, UserRequest
from paceline_lab.reporting.figures import percentile
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, load_average, write_report

MEMORY = KINDS[0]


def main_plan(minutes: float, places: int, seed: int) -> OverloadPlan:
    """What the command runs."""
    return OverloadPlan(places=places, storm_s=60 * minutes, seed=seed)


def row(phase: Phase, way: str) -> dict[str, object]:
    """One phase over one way."""
    served, refused = phase.of(SERVED, way), phase.of(REFUSED, way)
    gaps = [gap for each in served for gap in each.gaps_ms]
    hints = [each.hint_ms for each in refused if each.hint_ms is not None]
    return {
        "load": phase.name,
        "way": way,
        "requests a second": f"{sum(each.way == way for each in phase.asked) / phase.seconds:.1f}",
        "served": len(served),
        "refused": len(refused),
        "lost": len(phase.of(LOST, way)),
        "changed": len(phase.of(CHANGED, way)),
        "between tokens p50 ms": _shown(gaps, 50),
        "p99": _shown(gaps, 99),
        "first token p50 ms": _shown([each.first_ms for each in served], 50),
        "its p99": _shown([each.first_ms for each in served], 99),
        "refusal p50 ms": _shown([each.refusal_ms for each in refused], 50),
        "refusal p99": _shown([each.refusal_ms for each in refused], 99),
        "hints ms": f"{min(hints):.0f} to {max(hints):.0f}" if hints else "–",
    }


def _shown(values: Sequence[float], percent: float) -> str:
    return f"{percentile(values, percent):.1f}" if values else "–"


def over(found: Overloading, percent: float, phase: str) -> float:
    """Time between tokens in a phase over that at 1 ×, of both ways."""
    gaps = {name: [gap for each in found.phases[name].of(SERVED) for gap in each.gaps_ms] for name in (NORMAL, phase)}
    return percentile(gaps[phase], percent) / max(1e-9, percentile(gaps[NORMAL], percent))


def figures(found: Overloading) -> dict[str, object]:
    """What is promised of all of it together."""
    storm = found.phases[STORM]
    served_a_second = len(storm.of(SERVED)) / storm.seconds
    return {
        "capacity, requests a second": found.capacity,
        "came in the storm, times that": len(storm.asked) / storm.seconds / found.capacity,
        "served in the storm, of the capacity": served_a_second / found.capacity,
        "between tokens in the storm ÷ at 1 ×, p50": over(found, 50, STORM),
        "the same, p99": over(found, 99, STORM),
        "between tokens behind the storm ÷ before, p50": over(found, 50, AFTER),
        "refusals without a hint": len(unhinted(found)),
        "recovered, seconds": found.recovery_s,
    }


def unhinted(found: Overloading) -> list[UserRequest]:
    """Refusals that don't say when to come again."""
    return [each for phase in found.phases.values() for each in phase.of(REFUSED) if not each.hint_ms]


def memory(label: str, samples: Samples, ends_s: dict[str, float]) -> dict[str, object]:
    """What one process held."""
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


def text_of(found: Overloading) -> str:
    """The report behind its facts."""
    rows = [row(phase, way) for phase in found.phases.values() for way in (GRPC, HTTP)]
    promises = [{"what": name, "value": value} for name, value in figures(found).items()]
    held = [memory(label, samples, found.ends_s) for label, samples in found.resources.items()]
    return f"# Overload\n\n{markdown_table(rows)}\n{markdown_table(promises)}\n{markdown_table(held)}"


def failures(found: Overloading) -> list[str]:
    """What must not be, in words."""
    wrong = [each for phase in found.phases.values() for each in (*phase.of(LOST), *phase.of(CHANGED))]
    said = [f"{each.way} {each.outcome} {each.why}" for each in wrong]
    return [*said, *("a refusal without a hint" for _ in unhinted(found))]


@signals_interrupt()
def main() -> None:
    """Run, write the report, and fail on what must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="Of the storm.")
    parser.add_argument("--places", type=int, default=16, help="Requests that the coordinator runs at once.")
    parser.add_argument("--seed", type=int, default=1, help="Of when requests come.")
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    plan, before = main_plan(given.minutes, given.places, given.seed), load_average()
    with (
        tempfile.TemporaryDirectory() as folder,
        overload_services(Path(folder), plan) as services,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(overload(services, plan))
    facts = {name: str(value) for name, value in asdict(plan).items()}
    facts["load average"] = f"{before} before, {load_average()} after"
    values = {"figures": figures(found), "samples": {label: asdict(each) for label, each in found.resources.items()}}
    written = write_report(given.out, "overload", describe() | facts, values, text_of(found))
    print(written.read_text())
    assert not failures(found), "; ".join(failures(found)[:8])


if __name__ == "__main__":
    main()
