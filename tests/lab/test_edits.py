"""`bench edits`: what each setting asks for, what a turn keeps, when it goes on, and what the report says."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.client import Generation
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import GenerateRequest
from paceline_lab.bench.edits import command
from paceline_lab.bench.edits.report import comparisons, edits_json, edits_markdown
from paceline_lab.bench.edits.run import (
    LOOKUP,
    PLAIN,
    PREDICTED,
    SETTINGS,
    EditPlan,
    EditRun,
    EditStepLine,
    EditTask,
    EditTurn,
    load_tasks,
    run_edits,
    share_kept,
)
from tests.lab.fakes import generation, record

TASKS = (EditTask("one", "Do.", "", "abcdefgh"), EditTask("two", "Do.", "", "ijklmnop"))


@dataclass
class EditsRunner:
    """Answers "abcdefgh!", or other tokens to a request that predicts `unlike`."""

    unlike: str = ""
    calls: list[GenerateRequest] = field(default_factory=list)
    name = "auto"
    target_threads = 2
    processes = ()
    split = "target 2"

    def generate(self, request: GenerateRequest) -> Generation:
        self.calls.append(request)
        tokens = (9, 9) if self.unlike and request.prediction_text == self.unlike else (1, 2)
        return replace(generation(tokens, [record(2, 1)], 10.0), text="abcdefgh!")


def turns_of(runner: EditsRunner, **options: object) -> list[EditTurn]:
    turns: list[EditTurn] = []
    run_edits(EditPlan(TASKS), runner, turns.append, **options)  # type: ignore[arg-type]
    return turns


def test_every_setting_gets_the_same_prompt_and_only_some_the_file_as_prediction() -> None:
    runner = EditsRunner()
    turns = turns_of(runner)
    assert [turn.task for turn in turns] == ["one", "two"]
    first = runner.calls[: 1 + len(SETTINGS)]
    assert first[0].max_new_tokens == 2, "brings the prompt into the caches"
    assert len({request.messages for request in first}) == 1
    asked = {(each.speculation, each.prediction_text) for each in first[1:]}
    assert asked == {(each.speculation, "abcdefgh" if each.predicts else "") for each in SETTINGS.values()}


def test_a_turn_says_how_much_of_the_answer_stood_in_the_file_and_which_texts_differ() -> None:
    one, two = turns_of(EditsRunner(unlike="ijklmnop"))
    assert one.kept == pytest.approx(8 / 9)
    assert two.kept == 0
    assert {name: run.difference for name, run in two.runs.items() if run.difference is not None} == {
        name: 0 for name, setting in SETTINGS.items() if setting.predicts
    }
    assert "two T=0: prediction, from token 0" in edits_markdown([one, two])
    assert "All settings wrote the same" in edits_markdown([one])


@pytest.mark.parametrize(
    ("file", "answer", "kept"), [("abcdefgh", "abcdefgh", 1), ("abcdefgh", "efgh....", 0.5), ("ab", "abxx", 0)]
)
def test_few_characters_in_a_row_are_not_kept_but_alike(file: str, answer: str, kept: float) -> None:
    assert share_kept(file, answer) == kept


def timed(task: str, **wall_s: float) -> EditTurn:
    (turn, _) = turns_of(EditsRunner())
    runs = {name: replace(run, wall_s=wall_s.get(name.partition("+")[0], 4.0)) for name, run in turn.runs.items()}
    return replace(turn, task=task, runs=runs)


def test_settings_are_compared_by_the_time_of_whole_requests() -> None:
    turns = [timed("fast", prediction=1.0), timed("slow", prediction=8.0), timed("even", prediction=2.0)]
    found = {(each.setting, each.over): each for each in comparisons(turns)}
    versus = found[PREDICTED, LOOKUP]
    assert (versus.ratio.median, versus.ratio.low, versus.ratio.high) == (2.0, 0.5, 4.0)
    assert found[PREDICTED, PLAIN].ratio.median == 2.0
    assert [EditTurn.of_json(each) for each in json.loads(json.dumps(edits_json(turns)))["turns"]] == turns


def test_what_was_measured_before_is_skipped_and_time_ends_a_run() -> None:
    assert [turn.task for turn in turns_of(EditsRunner(), skip={("one", 0, 0.0)})] == ["two"]
    assert turns_of(EditsRunner(), until=0.0) == []


def test_unknown_edits_and_empty_plans_are_refused_by_name() -> None:
    assert len(load_tasks()) >= 8
    assert [task.name for task in load_tasks(["types", "rename"])] == ["types", "rename"]
    with pytest.raises(InvalidInput, match="task = 'none': must be one of rename"):
        load_tasks(["none"])
    with pytest.raises(InvalidInput, match="tokens = 1: must be at least 2"):
        EditPlan(TASKS, tokens=1)


def test_the_command_adds_to_its_report_of_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = EditsRunner()
    monkeypatch.setattr(command, "running_groups", lambda services, drafters, console: nullcontext({"auto": runner}))
    given = ["bench", "edits", "table:vocab=300", "--out", str(tmp_path), "--task"]
    shell = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "PACELINE_HOME": ""})
    assert shell.invoke(app, [*given, "rename"]).exit_code == 0
    calls = len(runner.calls)
    assert shell.invoke(app, [*given, "rename,values", "--add"]).exit_code == 0
    assert len(runner.calls) == 2 * calls, "the first edit was there"
    (report,) = tmp_path.glob("*.json")
    assert [turn["task"] for turn in json.loads(report.read_text())["turns"]] == ["rename", "values"]
    refused = shell.invoke(app, [*given, "rename", "--add", "--tokens", "50"])
    assert refused.exit_code != 0
    assert "tokens of an answer" in refused.output
    assert PLAIN in next(tmp_path.glob("*.md")).read_text()


def stepped(task: str, prediction: int, lookup: int) -> EditTurn:
    """Rounds of four rows and of one, after a first that computed the prompt."""
    (turn, _) = turns_of(EditsRunner())

    def run(fours: int) -> EditRun:
        rows = (4, *(4,) * fours, 1)
        return replace(turn.runs[PLAIN], rows=rows, step_ms=(999.0, *(130.0,) * fours, 100.0))

    return replace(turn, task=task, runs={LOOKUP: run(lookup), PREDICTED: run(prediction)})


def test_steps_are_counted_as_they_take_in_the_median() -> None:
    turns = [stepped("better", 1, 3), stepped("worse", 4, 3)]
    line = EditStepLine.of(turns)
    assert (line.one_row_ms, line.row_ms) == (100.0, 10.0)
    assert line.seconds(turns[0].runs[PREDICTED]) == pytest.approx(0.36)
    (versus,) = comparisons(turns)
    assert [versus.steps.low, versus.steps.high] == pytest.approx([620 / 750, 620 / 360])
    assert versus.losses == ("worse",)
    assert "A step of one row took 100 ms in the median, and 10.0 ms" in edits_markdown(turns)


def test_some_settings_can_be_left_out() -> None:
    runner, turns = EditsRunner(), list[EditTurn]()
    run_edits(EditPlan(TASKS, settings=(LOOKUP, PREDICTED)), runner, turns.append)
    assert [list(turn.runs) for turn in turns] == [[LOOKUP, PREDICTED]] * 2
    assert [(each.setting, each.over) for each in comparisons(turns)] == [(PREDICTED, LOOKUP)]
    with pytest.raises(InvalidInput, match="setting = 'no': must be one of target-only, "):
        EditPlan(TASKS, settings=("no",))
