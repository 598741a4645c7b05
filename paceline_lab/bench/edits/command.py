"""`paceline bench edits`: services started, every setting run, the report written."""

from __future__ import annotations

import time
from pathlib import Path

from paceline.runtime.config import NOT_QUANTIZED
from paceline_lab.bench.edits.report import edits_json, edits_markdown, edits_plots
from paceline_lab.bench.edits.run import EditPlan, EditTurn, run_edits
from paceline_lab.bench.speed.groups import MeasuredServices, running_groups
from paceline_lab.reporting.progress import progress_bar, stderr_console
from paceline_lab.reporting.reports import describe, earlier_turns, load_average, write_report


def measure_edits(
    services: MeasuredServices, plan: EditPlan, drafter: str, minutes: float, out: Path, name: str, *, add: bool
) -> Path:
    """Run the plan on services of one drafter, and begin no other turn after so many minutes; returns the report.

    What was measured before a failure or Ctrl-C is reported too. `add`: go on where today's report ends.

    Raises:
        InvalidInput: an earlier report of something else.
    """
    console = stderr_console()
    asked = {
        "model": services.model,
        "quantization": services.quantization or NOT_QUANTIZED,
        "services": drafter,
        "tokens of an answer": f"at most {plan.tokens}",
        "settings": ", ".join(plan.settings),
    }
    done = [EditTurn.of_json(turn) for turn in earlier_turns(out, name, asked)] if add else []
    with running_groups(services, (drafter,), console) as groups:
        (group,) = groups.values()
        facts = describe() | asked | {"compute threads": group.split, "load average before": load_average()}
        try:
            with progress_bar(console, "edits", len(plan.turns()) - len(done)) as advance:

                def note(turn: EditTurn) -> None:
                    done.append(turn)
                    advance(f"{turn.task} T={turn.temperature:g}")

                until = time.monotonic() + 60 * minutes
                run_edits(plan, group, note, skip={turn.key for turn in done}, until=until)
        finally:
            if done:
                report = write_report(out, name, facts, edits_json(done), edits_markdown(done), edits_plots(done))
    return report
