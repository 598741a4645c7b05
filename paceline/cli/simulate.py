"""`paceline simulate`: a recorded run at its own settings and at others, a cluster that a file describes, studies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.app import app
from paceline.cli.support import example, listed
from paceline.protocol.errors import require
from paceline.protocol.proposal import AUTO

if TYPE_CHECKING:
    from benchmarks.simulator.policies import Policy
    from benchmarks.simulator.trace import TracedSetting
    from paceline.costs.cost_line import CostLine

EPILOG = example(
    "paceline simulate --trace run.jsonl",
    "paceline simulate --trace run.jsonl --sessions 1,8,64 --k 0,2,4,4+ahead",
    "paceline simulate --trace run.jsonl --target-line 1:20,16:24 --draft-line 1:2 --target-one-way-ms 5",
    "paceline simulate --scenario cluster.toml --out reports",
    "paceline simulate --study drafts --out reports",
)


@app.command(epilog=EPILOG)
def simulate(
    trace: Annotated[Path | None, typer.Option(help="As `paceline bench record` writes it.")] = None,
    scenario: Annotated[Path | None, typer.Option(help="A cluster: a TOML file (docs/capacity.md).")] = None,
    study: Annotated[str, typer.Option(help="Of docs/capacity.md, by name; all: every one.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder of a scenario's or study's report.", show_default="shown only")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of a scenario or study, in place of its own.", min=0)] = None,
    sessions: Annotated[
        str, typer.Option(help="Requests at once, with commas between.", show_default="as they came")
    ] = "",
    k: Annotated[
        str,
        typer.Option(
            help="Tokens proposed: auto, numbers, N+ahead (outcomes drafted meanwhile), with commas between."
        ),
    ] = "auto,0,1,2,4,8",
    fan_out: Annotated[int, typer.Option(help="Of N+ahead: next tokens for each node.")] = 4,
    target_line: Annotated[
        str, typer.Option(help="ROWS:MS, with commas between: a target step.", show_default="the trace's")
    ] = "",
    beside_line: Annotated[
        str, typer.Option(help="The same while a draft works on its cores; own: it has its own.")
    ] = "",
    draft_line: Annotated[str, typer.Option(help="A draft step.", show_default="the trace's")] = "",
    target_one_way_ms: Annotated[float | None, typer.Option(help="Delay to the target.")] = None,
    draft_one_way_ms: Annotated[float | None, typer.Option(help="Delay to the draft service.")] = None,
) -> None:
    """Simulate on a virtual clock: a recorded run at each setting, a cluster that a file describes, or a study."""
    given = sum((trace is not None, scenario is not None, bool(study)))
    require(given == 1, "trace, scenario, study", given, "exactly one of them")
    if trace is None:
        typer.echo(_cluster(scenario, study, out, seed))
        return
    from benchmarks.simulator.report import compare, comparison_text, replay_trace
    from benchmarks.simulator.trace import read_trace

    read = read_trace(trace)
    replayed = replay_trace(read)
    if replayed is not None:
        typer.echo(comparison_text([replayed.row()]))
    changes: dict[str, object] = {
        "target_one_way_ms": target_one_way_ms,
        "draft_one_way_ms": draft_one_way_ms,
        "alone": _line("target_line", target_line),
        "beside": _line("beside_line", beside_line),
        "draft": _line("draft_line", draft_line),
    }
    setting = read.setting.of_run(**{name: value for name, value in changes.items() if value is not None})
    counts = [_whole("sessions", text) for text in listed(sessions)]
    typer.echo(comparison_text(compare(setting, read.requests, _policies(k, fan_out, setting), counts)))


def _cluster(file: Path | None, study: str, out: Path | None, seed: int | None) -> str:
    from benchmarks.simulator.cluster_report import report_scenario
    from benchmarks.simulator.scenario import Scenario
    from benchmarks.simulator.studies import run_studies

    if file is None:
        return run_studies(study, out, seed or 0)
    found = Scenario.read(file)
    return report_scenario(found if seed is None else found.model_copy(update={"seed": seed}), file, out)


def _policies(text: str, fan_out: int, setting: TracedSetting) -> list[Policy]:
    from benchmarks.simulator.planned import PlannedPolicy
    from benchmarks.simulator.report import parse_policy

    found: list[Policy] = [PlannedPolicy() if each == AUTO else parse_policy(each, fan_out) for each in listed(text)]
    require(bool(found), "k", text, "auto or a number, or more of them")
    drafts = setting.draft.is_known or all(each.name in ("0", AUTO) for each in found)
    require(drafts, "k", text, "0 or auto, since the trace has no draft; or give --draft-line")
    return found


def _line(field: str, text: str) -> CostLine | None:
    """A line, or none where nothing was given; `own` is a line without points."""
    from paceline.costs.cost_line import CostLine

    if not text:
        return None
    return CostLine() if text == "own" else CostLine.parse(field, text)


def _whole(field: str, text: str) -> int:
    require(text.isdecimal() and int(text) > 0, field, text, "whole numbers, at least 1")
    return int(text)
