"""`bench speed --k`: what runs, in which order, when it stops and goes on, and what the report makes of it."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.client import Generation
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import ChatMessage, GenerateRequest
from paceline_lab.bench.prompts import Prompt
from paceline_lab.bench.speed import command
from paceline_lab.bench.speed.groups import MeasuredServices
from paceline_lab.bench.speed.lengths import LengthRun, LengthsTurn, drafters_of, run_lengths, settings_of
from paceline_lab.bench.speed.lengths_report import lengths_json, lengths_markdown, lengths_plots, lengths_rows
from paceline_lab.bench.speed.run import SpeedPlan, Variant
from tests.lab.fakes import generation, record

TARGET = "table:vocab=300,seed=1"
SETTINGS = ["target-only", "k=0", "k=2", "auto"]

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "PACELINE_HOME": ""})


@dataclass
class LengthsRunner:
    """Ten tokens per second without drafts, twenty with two, `auto` as told by prompt; auto's text may differ."""

    auto: dict[str, float]
    auto_text: tuple[int, ...] = tuple(range(6))
    calls: list[GenerateRequest] = field(default_factory=list)
    name = "auto"
    target_threads = 2
    processes = ()

    def generate(self, request: GenerateRequest) -> Generation:
        self.calls.append(request)
        asked = request.speculation
        if asked.off:
            return generation(range(6), [record(1, 0)] * 6, 10.0)
        if asked.num_draft_tokens == 2:
            return generation(range(6), [record(3, 2)] * 2, 20.0)
        speed = self.auto[request.messages[-1].content]
        return generation(self.auto_text, [record(3, 2)] * (2 if speed else 1), speed)


def prompt(kind: str, name: str) -> Prompt:
    return Prompt(kind, name, ((ChatMessage("user", name),),))


def plan(**changes: object) -> SpeedPlan:
    prompts = {"chat": (prompt("chat", "a"), prompt("chat", "b")), "code": (prompt("code", "c"),)}
    fields: dict[str, object] = {"prompts": prompts, "variants": (Variant("auto"),), "pairs": 2, "tokens": 6}
    return SpeedPlan(**(fields | changes))  # type: ignore[arg-type]


def measured(runner: LengthsRunner, **changes: object) -> list[LengthsTurn]:
    turns: list[LengthsTurn] = []
    run_lengths(plan(**changes), settings_of(plan(), (0, 2), ()), runner, turns.append)
    return turns


SPEEDS = {"a": 18.0, "b": 22.0, "c": 5.0}


def kept(turn: LengthsTurn) -> tuple[str, str, int]:
    return turn.kind, turn.prompt, turn.number


def test_every_setting_gets_the_same_prompt_and_seed_in_an_order_of_its_own() -> None:
    fake = LengthsRunner(SPEEDS)
    turns = measured(fake)
    assert [kept(turn) for turn in turns] == [("chat", "a", 0), ("code", "c", 0), ("chat", "b", 1), ("code", "c", 1)]
    assert all(list(turn.runs) == SETTINGS for turn in turns)
    of_turns = fake.calls[len(SETTINGS) :]
    each = [of_turns[begin + 1 : begin + 5] for begin in range(0, len(of_turns), 5)]
    for calls, turn in zip(each, turns, strict=True):
        assert {(call.messages[0].content, call.seed, call.max_new_tokens) for call in calls} == {
            (turn.prompt, turn.seed, 6)
        }
        assert sorted((call.speculation.off, call.speculation.num_draft_tokens or 0) for call in calls) == [
            *((False, 0), (False, 2), (True, 0), (True, 0))
        ]
    orders = {tuple((call.speculation.off, call.speculation.num_draft_tokens) for call in calls) for calls in each}
    assert len(orders) > 1


def test_a_short_generation_with_the_longest_proposals_comes_before_each_turn() -> None:
    fake = LengthsRunner(SPEEDS)
    measured(fake)
    primings = fake.calls[len(SETTINGS) :][::5]
    assert [(call.messages[0].content, call.max_new_tokens) for call in primings] == [
        *(("a", 2), ("c", 2), ("b", 2), ("c", 2))
    ]
    assert all(call.speculation.num_draft_tokens == 2 for call in primings)


def test_no_pass_begins_after_the_time_and_the_one_that_runs_is_ended() -> None:
    turns: list[LengthsTurn] = []
    run_lengths(plan(pairs=5), settings_of(plan(), (2,), ()), LengthsRunner(SPEEDS), turns.append, until=0.0)
    assert [kept(turn) for turn in turns] == [("chat", "a", 0), ("code", "c", 0)]


def test_turns_measured_before_are_not_run_again() -> None:
    fake = LengthsRunner(SPEEDS)
    turns: list[LengthsTurn] = []
    run_lengths(
        plan(),
        settings_of(plan(), (0, 2), ()),
        fake,
        turns.append,
        skip={("chat", "a", 0, 0.0), ("code", "c", 0, 0.0)},
    )
    assert [kept(turn) for turn in turns] == [("chat", "b", 1), ("code", "c", 1)]


def test_every_figure_of_the_comparison() -> None:
    chat, code = lengths_rows(measured(LengthsRunner(SPEEDS)))
    assert (chat.kind, chat.turns, chat.plain.median, chat.noise.median) == ("chat", 2, 10.0, 1.0)
    assert (chat.best, chat.ratios["k=2"].median) == ("k=2", 2.0)
    assert (chat.auto.median, chat.auto.low, chat.worst) == (2.0, 1.8, "a")
    assert chat.over_best.median == pytest.approx(1.0)
    assert chat.accepted == {"k=0": 0.0, "k=2": 2.0, "auto": 2.0}
    # 5 of 6 rounds' steps of 30 ms for 5 tokens, one step of 40 ms for the 3 tokens behind the first round.
    assert chat.ceilings["auto"] == pytest.approx((3 / 0.040) / (5 / 0.150))
    assert (code.auto.median, code.over_best.median) == (0.5, 0.25)


def test_the_summary_names_the_least_row() -> None:
    text = lengths_markdown(lengths_rows(measured(LengthsRunner(SPEEDS))))
    assert "- auto ÷ best fixed, over 2 rows: least 0.250 (code, T=0), median 0.625" in text
    assert "- auto ÷ target-only, over 2 rows: least 0.500 (code, T=0), median 1.250" in text
    assert "| code | 0 | 2 | 10.00 | 1.00 (1.00 to 1.00) | k=2: 2.00 | 0.50 (0.50 to 0.50) |" in text
    assert "c: 0.50" in text


def test_answers_too_short_to_have_a_speed_are_counted_and_left_out() -> None:
    rows = lengths_rows(measured(LengthsRunner(SPEEDS | {"a": 0.0, "c": 0.0})))
    assert [(row.kind, row.turns, row.left_out) for row in rows] == [("chat", 1, 1)]
    assert "1 (1 too short)" in lengths_markdown(rows)
    assert "No answer was long enough" in lengths_markdown([])


def test_mutant_a_text_that_is_not_target_only_s_is_listed_with_its_setting_and_token() -> None:
    turns = measured(LengthsRunner(SPEEDS, (0, 1, 9, 3, 4, 5)))
    assert "- chat T=0 auto: prompt a, pass 0, from token 2" in lengths_markdown(lengths_rows(turns))


def test_the_report_can_be_made_again_from_its_json() -> None:
    turns = measured(LengthsRunner(SPEEDS))
    rows = lengths_rows(turns)
    values = json.loads(json.dumps(lengths_json(rows, turns)))
    again = [LengthsTurn.of_json(value) for value in values["turns"]]
    assert lengths_rows(again) == rows
    assert isinstance(again[0].runs["auto"], LengthRun)
    (plot,) = lengths_plots(rows)
    assert [bars.label for bars in plot.bars] == ["best fixed", "auto"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--k", "2", "--drafter", "ngram,auto"], ("drafter", "'ngram,auto'", "one drafter")),
        (["--k", "2", "--drafter", "none"], ("drafter", "'none'")),
        (["--k", "2", "--num-draft-tokens", "3"], ("num_draft_tokens", "3", "auto")),
        (["--k", "65"], ("num_draft_tokens", "65", "[0, 64]")),
        (["--k", ""], ("k", "one number")),
        (["--k", "two"], ("k", "'two'", "whole numbers")),
        (["--add"], ("add", "--k or --alone")),
        (["--minutes", "0"], ("minutes", "0", "above 0")),
        (["--url", "127.0.0.1:1", "--quantization", "int8"], ("quantization", "'int8'", "--url")),
    ],
    ids=["two", "none", "both", "many", "no-k", "words", "add", "minutes", "quantization"],
)
def test_bad_comparisons_are_one_line(arguments: list[str], parts: tuple[str, ...]) -> None:
    result = runner.invoke(app, ["bench", "speed", TARGET, *arguments])
    assert result.exit_code == 2
    assert all(part in result.stderr for part in parts), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_report_is_gone_on_with_by_the_same_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = LengthsRunner(SPEEDS)
    monkeypatch.setattr(command, "running_groups", lambda *_: nullcontext({"auto": fake}))
    monkeypatch.setattr(command, "_facts", lambda *_: {})
    services = MeasuredServices(TARGET)

    def measure(wanted: SpeedPlan) -> list[str]:
        command.measure_lengths(services, wanted, (0, 2), (), math.inf, tmp_path, "lengths", add=True)
        (report,) = tmp_path.glob("lengths-*.json")
        return [turn["prompt"] for turn in json.loads(report.read_text())["turns"]]

    assert measure(plan(pairs=1)) == ["a", "c"]
    calls = len(fake.calls)
    assert measure(plan(pairs=2)) == ["a", "c", "b", "c"]
    assert len(fake.calls) - calls == len(SETTINGS) + 2 * 5, "the warm-up and two turns"
    with pytest.raises(InvalidInput, match=r"tokens of each generation in .* = '6': must be '7', as now"):
        measure(plan(tokens=7))


@pytest.mark.parametrize(
    ("drafter", "offered"),
    [
        ("auto:default+a/medusa", ("ngram", "model", "model:a/medusa")),
        ("model:default+a/medusa", ("model", "model:a/medusa")),
        ("ngram", ()),
    ],
)
def test_the_drafters_that_services_offer_by_the_names_of_requests(drafter: str, offered: tuple[str, ...]) -> None:
    assert drafters_of(drafter, TARGET) == offered
    named = settings_of(plan(variants=(Variant(drafter),)), (), offered)
    assert list(named) == ["target-only", "k=0", *(name.rpartition("/")[2] for name in offered), "auto"]


def test_each_drafter_alone_beside_auto(tmp_path: Path) -> None:
    drafts = f"auto:{TARGET},noise=0.2+{TARGET},noise=0.4"
    arguments = ["--drafter", drafts, "--alone", "--k", "2", "--kind", "code", "--pairs", "1", "--tokens", "12"]
    result = runner.invoke(app, ["bench", "speed", TARGET, *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (turn,) = json.loads(next(tmp_path.glob("speed-*.json")).read_text())["turns"]
    assert list(turn["runs"]) == [
        *("target-only", "k=0", "k=2", "ngram", "model", f"model:{TARGET},noise=0.4"),
        *("ngram k=2", "model k=2", f"model:{TARGET},noise=0.4 k=2", "auto"),
    ]
    assert all(run["difference"] is None for run in turn["runs"].values())
    assert "Rounds that accept" in next(tmp_path.glob("speed-*.md")).read_text()


def test_the_command_compares_on_one_group_of_services(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question_id": n, "category": "river", "turns": [f"Which river {n}?"]}) for n in range(2)]
    questions.write_text("\n".join(lines))
    arguments = ["--drafter", f"auto:{TARGET},noise=0.2", "--k", "0,2", "--prompts", str(questions), "--pairs", "2"]
    result = runner.invoke(app, ["bench", "speed", TARGET, *arguments, "--tokens", "12", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("starting services") == 1
    values = json.loads(next(tmp_path.glob("speed-*.json")).read_text())
    assert [turn["prompt"] for turn in values["turns"]] == ["0", "1"]
    assert all(list(turn["runs"]) == SETTINGS for turn in values["turns"])
    assert all(run["difference"] is None for turn in values["turns"] for run in turn["runs"].values())
    assert all(turn["runs"]["k=2"]["accepted"] > 0 for turn in values["turns"])
