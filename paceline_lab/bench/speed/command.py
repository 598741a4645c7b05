"""`paceline bench speed`: services started, everything run, the report written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from paceline.runtime.config import NOT_QUANTIZED
from paceline_lab.bench.speed.groups import MeasuredServices, running_groups
from paceline_lab.bench.speed.report import speed_json, speed_markdown, speed_plots, speed_rows
from paceline_lab.bench.speed.run import SpeedPlan, SpeedTurn, run_speed
from paceline_lab.bench.speed.settings import short_name, with_split
from paceline_lab.reporting.progress import progress_bar, stderr_console
from paceline_lab.reporting.reports import describe, earlier_turns, load_average, write_report


def measure_speed(
    services: MeasuredServices, plan: SpeedPlan, minutes: float, out: Path, name: str, *, add: bool = False
) -> Path:
    """Run the plan, and begin no other pass after so many minutes; return the report.

    The report has what was measured before a failure or Ctrl-C, too. `add`: go on where today's report ends.

    Raises:
        InvalidInput: an earlier report of something else.
    """
    console = stderr_console()
    same_run = {
        "model": services.model,
        "quantization": services.quantization or NOT_QUANTIZED,
        "tokens of each generation": str(plan.tokens),
        "settings": ", ".join(plan.settings),
    }
    turns = [SpeedTurn.of_json(turn) for turn in earlier_turns(out, name, same_run)] if add else []
    names = tuple(dict.fromkeys(setting.group for setting in plan.settings.values()))
    with running_groups(services, names, console) as groups:
        plan = replace(plan, settings=with_split(plan.settings, groups))
        facts = describe() | same_run | {"turns of each row": str(plan.pairs), "load average before": load_average()}
        facts["compute threads"] = "; ".join(
            f"{short_name(drafter)}: {group.split}" for drafter, group in groups.items()
        )
        try:
            with progress_bar(console, "turns", len(plan) - len(turns)) as advance:

                def note(turn: SpeedTurn) -> None:
                    turns.append(turn)
                    advance(f"{turn.kind} T={turn.temperature:g} {turn.prompt}")

                skip = {turn.key for turn in turns}
                run_speed(plan, groups, note, skip=skip, until=time.monotonic() + 60 * minutes)
        finally:
            if turns:
                rows = speed_rows(turns)
                report = write_report(
                    out, name, facts, speed_json(rows, turns), speed_markdown(rows), speed_plots(rows)
                )
    return report
