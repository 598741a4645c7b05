"""`paceline simulate`: a recorded run at its own settings and at others, a cluster that a file describes, studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.support import example, split_commas
from paceline.costs.acceptance import FAN_OUT
from paceline.protocol.errors import require
from paceline.protocol.proposal import AUTO
from paceline_lab.commands.extras import whole_numbers

if TYPE_CHECKING:
    from paceline.costs.cost_line import CostLine
    from paceline_lab.simulate.policies import Policy
    from paceline_lab.simulate.trace import TracedSetting

LENGTHS = "auto,0,1,2,4,8"
commands = typer.Typer()
EPILOG = example(
    "paceline simulate --trace run.jsonl",
    "paceline simulate --trace run.jsonl --sessions 1,8,64 --k 0,2,4,4+ahead",
    "paceline simulate --trace run.jsonl --target-line 1:20,16:24 --draft-line 1:2 --target-one-way-ms 5",
    "paceline simulate --scenario cluster.toml --out reports",
    "paceline simulate --study drafts --out reports",
)


@commands.command(epilog=EPILOG)
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
    ] = LENGTHS,
    fan_out: Annotated[int, typer.Option(help="Of N+ahead: next tokens for each node.")] = FAN_OUT,
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
    sources = sum((trace is not None, scenario is not None, bool(study)))
    require(sources == 1, "trace, scenario, study", sources, "exactly one of them")
    ways = {"target_one_way_ms": target_one_way_ms, "draft_one_way_ms": draft_one_way_ms}
    lines = {"target_line": target_line, "beside_line": beside_line, "draft_line": draft_line}
    if trace is None:
        lengths = {"k": None if k == LENGTHS else k, "fan_out": None if fan_out == FAN_OUT else fan_out}
        _require_absent("with --study" if study else "with --scenario", sessions=sessions, **lengths, **lines, **ways)
        typer.echo(_cluster(scenario, study, out, seed))
        return
    _require_absent("with --trace", seed=seed, out=None if out is None else str(out))
    if "+ahead" not in k:
        _require_absent("without N+ahead in k", fan_out=None if fan_out == FAN_OUT else fan_out)
    costs = {name: _line(name, text) for name, text in lines.items()}
    _replay(trace, {**ways, **costs}, k, fan_out, whole_numbers("sessions", sessions, least=1))


def _require_absent(limit: str, **options: object) -> None:
    """Refuse options that can't have an effect; None or empty: the option was left out.

    Raises:
        InvalidInput: it names the first option that wasn't left out.
    """
    for name, value in options.items():
        require(value is None or value == "", name, value, f"left out {limit}")


def _replay(trace: Path, changes: Mapping[str, object], k: str, fan_out: int, sessions: Sequence[int]) -> None:
    """Show a recorded run at its own settings, and at others with these changes to its services."""
    from paceline_lab.simulate.report import compare, comparison_text, replay_trace
    from paceline_lab.simulate.trace import read_trace

    read = read_trace(trace)
    field_names = {"target_line": "alone", "beside_line": "beside", "draft_line": "draft"}
    fields = {field_names.get(name, name): value for name, value in changes.items() if value is not None}
    setting = read.setting.of_run(**fields)
    if not setting.draft.is_known:
        of_drafts = {name: changes[name] for name in ("beside_line", "draft_one_way_ms")}
        _require_absent("since the trace has no draft; or give --draft-line", **of_drafts)
    comparison = replay_trace(read)
    if comparison is not None:
        typer.echo(comparison_text([comparison.row()]))
    typer.echo(comparison_text(compare(setting, read.requests, _policies(k, fan_out, setting), sessions)))


def _cluster(file: Path | None, study: str, out: Path | None, seed: int | None) -> str:
    from paceline_lab.simulate.cluster_report import report_scenario
    from paceline_lab.simulate.scenario import Scenario
    from paceline_lab.simulate.studies import run_studies

    if file is None:
        return run_studies(study, out, seed or 0)
    cluster = Scenario.read(file)
    return report_scenario(cluster if seed is None else cluster.model_copy(update={"seed": seed}), file, out)


def _policies(text: str, fan_out: int, setting: TracedSetting) -> list[Policy]:
    from paceline_lab.simulate.policies import Policy

    policies = [Policy.parse(each, fan_out) for each in split_commas(text)]
    require(bool(policies), "k", text, "auto or a number, or more of them")
    drafts = setting.draft.is_known or all(each.name in ("0", AUTO) for each in policies)
    require(drafts, "k", text, "0 or auto, since the trace has no draft; or give --draft-line")
    return policies


def _line(field: str, text: str) -> CostLine | None:
    """Return a line, or None for an empty text; `own` is a line without points."""
    from paceline.costs.cost_line import CostLine

    if not text:
        return None
    return CostLine() if text == "own" else CostLine.parse(field, text)
