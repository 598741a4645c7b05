"""`paceline bench speed`: services started, everything run, the report written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.protocol.proposal import NONE
from paceline.runtime.config import NOT_QUANTIZED
from paceline_lab.bench.speed.groups import MeasuredServices, ServiceGroup, running_groups
from paceline_lab.bench.speed.lengths import LengthsTurn, check_lengths, run_lengths, settings_of
from paceline_lab.bench.speed.lengths_report import lengths_json, lengths_markdown, lengths_plots, lengths_rows
from paceline_lab.bench.speed.report import TargetStepCosts, speed_json, speed_markdown, speed_plots, speed_rows
from paceline_lab.bench.speed.run import SpeedPair, SpeedPlan, Variant, run_speed
from paceline_lab.reporting.progress import progress_bar, stderr_console
from paceline_lab.reporting.reports import describe, earlier_turns, load_average, write_report


def measure_speed(services: MeasuredServices, plan: SpeedPlan, minutes: float, out: Path, name: str) -> Path:
    """Run the plan, and no other pass after so many minutes; returns the report.

    What was measured before a failure or Ctrl-C is reported too.
    """
    console = stderr_console()
    with running_groups(services, (NONE, *plan.drafters), console) as groups:
        facts = _facts(services, plan, groups)
        done: list[SpeedPair] = []
        try:
            with progress_bar(console, "pairs", len(plan)) as advance:

                def note(pair: SpeedPair) -> None:
                    done.append(pair)
                    advance(f"{pair.turn.prompt.kind} T={pair.turn.temperature:g} {pair.turn.variant.name}")

                run_speed(plan, groups, note, until=time.monotonic() + 60 * minutes)
        finally:
            if done:
                costs = TargetStepCosts.of(done, groups)
                rows = speed_rows(done, costs)
                text, values = speed_markdown(rows, costs), speed_json(rows, done, costs)
                report = write_report(out, name, facts, values, text, speed_plots(rows))
    return report


def measure_lengths(
    services: MeasuredServices,
    plan: SpeedPlan,
    lengths: Sequence[int],
    alone: Sequence[str],
    minutes: float,
    out: Path,
    name: str,
    *,
    add: bool = False,
) -> Path:
    """Run `auto` beside constant lengths and drafters alone on one group of services.

    `add`: go on where today's report ends.

    What was measured before a failure or Ctrl-C is reported too.

    Raises:
        InvalidInput: lengths or a plan that can't be compared, or an earlier report of something else.
    """
    check_lengths(plan, lengths, alone)
    console = stderr_console()
    settings = settings_of(plan, lengths, alone)
    asked = _asked(services, plan) | {"settings": ", ".join(settings)}
    done = [LengthsTurn.of_json(turn) for turn in earlier_turns(out, name, asked)] if add else []
    with running_groups(services, plan.drafters, console) as groups:
        facts = _facts(services, plan, groups) | asked
        try:
            with progress_bar(console, "turns", len(plan) - len(done)) as advance:

                def note(turn: LengthsTurn) -> None:
                    done.append(turn)
                    advance(f"{turn.kind} T={turn.temperature:g} {turn.prompt}")

                (group,) = groups.values()
                skip = {turn.key for turn in done}
                run_lengths(plan, settings, group, note, skip=skip, until=time.monotonic() + 60 * minutes)
        finally:
            if done:
                rows = lengths_rows(done)
                values = lengths_json(rows, done)
                report = write_report(out, name, facts, values, lengths_markdown(rows), lengths_plots(rows))
    return report


def _asked(services: MeasuredServices, plan: SpeedPlan) -> dict[str, str]:
    """What two runs must share to be of one report."""
    return {
        "model": services.model,
        "quantization": services.quantization or NOT_QUANTIZED,
        "tokens of each generation": str(plan.tokens),
        "drafters": ", ".join(variant.name for variant in plan.variants),
    }


def _facts(services: MeasuredServices, plan: SpeedPlan, groups: Mapping[str, ServiceGroup]) -> dict[str, str]:
    return (
        describe()
        | _asked(services, plan)
        | {
            "pairs of each row": str(plan.pairs),
            "compute threads": "; ".join(f"{Variant(name).name}: {group.split}" for name, group in groups.items()),
            "load average before": load_average(),
        }
    )
