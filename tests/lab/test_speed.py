"""`bench speed`: what runs in which order, what the report says of it, and that it would notice another text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.client import Generation
from paceline.local.settings import ServeSettings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import ChatMessage, GenerateRequest
from paceline.protocol.proposal import Acceptance
from paceline_lab.bench.prompts import KINDS, Prompt, load_prompts
from paceline_lab.bench.speed import command
from paceline_lab.bench.speed.groups import GenerationRunner, MeasuredServices
from paceline_lab.bench.speed.report import SpeedRow, speed_json, speed_markdown, speed_plots, speed_rows
from paceline_lab.bench.speed.run import SpeedPlan, SpeedTurn, first_difference, run_speed
from paceline_lab.bench.speed.settings import (
    AGAIN,
    PLAIN,
    drafter_settings,
    drafters_of,
    fixed_settings,
    short_name,
    with_split,
)
from paceline_lab.commands.bench import split_drafters
from paceline_lab.reporting.presentation import draw
from tests.lab.fakes import FakeRunner, generation, prompt, record

TARGET = "table:vocab=300,seed=1"
NEAR = f"model:{TARGET},noise=0.2"
RULES, COUNTS = (Acceptance.COUPLED,), (None,)
SPLIT = "target-only beside model:x"
Calls = list[tuple[str, GenerateRequest]]

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "PACELINE_HOME": ""})


def plan(**changes: object) -> SpeedPlan:
    fields: dict[str, object] = {
        "prompts": {"chat": (prompt("a"), prompt("b"))},
        "settings": drafter_settings(("ngram", "model:x"), RULES, COUNTS),
        "pairs": 4,
        "tokens": 16,
    }
    return SpeedPlan(**(fields | changes))  # type: ignore[arg-type]


def fakes(**changes: object) -> tuple[dict[str, GenerationRunner], Calls]:
    calls: Calls = []
    groups: dict[str, GenerationRunner] = {
        "none": FakeRunner("none", 2, calls),
        "ngram": FakeRunner("ngram", 2, calls),
        "model:x": FakeRunner("model:x", 1, calls, **changes),  # type: ignore[arg-type]
    }
    return groups, calls


def measured(wanted: SpeedPlan, groups: Mapping[str, GenerationRunner]) -> list[SpeedTurn]:
    turns: list[SpeedTurn] = []
    wanted = replace(wanted, settings=with_split(wanted.settings, groups))
    run_speed(wanted, groups, turns.append)
    return turns


def test_every_setting_gets_the_same_prompt_and_seed_on_its_services_in_an_order_of_its_own() -> None:
    groups, calls = fakes()
    turns = measured(plan(), groups)
    settings = [PLAIN, AGAIN, "ngram", "model:x", SPLIT]
    assert [list(turn.runs) for turn in turns] == [settings] * 4
    assert len(plan()) == 4
    in_turns = calls[len(settings) :]
    size = len(groups) + len(settings)
    each = [in_turns[begin : begin + size] for begin in range(0, len(in_turns), size)]
    orders = set()
    for number, (of_turn, turn) in enumerate(zip(each, turns, strict=True)):
        asked = {(call.messages[0].content, call.seed) for _, call in of_turn}
        assert asked == {(turn.prompt, turn.seed)} == {("ab"[number % 2], number)}
        priming, runs = of_turn[: len(groups)], of_turn[len(groups) :]
        assert [(name, call.max_new_tokens) for name, call in priming] == [(name, 2) for name in groups]
        assert sorted((name, call.speculation.off) for name, call in runs) == [
            *(("model:x", False), ("model:x", True), ("ngram", False), ("none", True), ("none", True))
        ]
        assert all(call.ignore_eos and call.max_new_tokens == 16 for _, call in runs)
        orders.add(tuple((name, call.speculation.off) for name, call in runs))
    assert len(orders) > 1


def test_answers_that_end_run_one_after_the_other_and_count_once() -> None:
    ends = Prompt("json", "short", ((ChatMessage("user", "1"),), (ChatMessage("user", "2"),)), ends=True)
    groups, calls = fakes()
    (turn,) = measured(plan(prompts={"json": (ends,)}, pairs=1), groups)
    asked = [call.messages[0].content for name, call in calls if name == "ngram"]
    assert asked == ["1", "1", "1", "2"], "behind a warm-up and a short one of the first chat"
    assert not any(call.ignore_eos for _, call in calls)
    assert turn.runs["ngram"].tokens == 32
    assert turn.runs["ngram"].tokens_per_second == pytest.approx(50)


def test_every_figure_of_the_report() -> None:
    groups, _ = fakes()
    (row,) = speed_rows(measured(plan(), groups))
    assert (row.kind, row.turns, row.short_turns, row.noise.median) == ("chat", 4, 0, 1.0)
    plain, ngram = row.settings[PLAIN], row.settings["ngram"]
    assert (plain.speed.median, ngram.speed.median, row.settings[SPLIT].ratio.median) == (20.0, 50.0, 1.0)
    assert (ngram.ratio.median, ngram.ratio_lower) == (2.5, 2.5)
    # 12 tokens behind the first round in 3 steps of 40 ms; target-only 15 in 15 steps of 30 ms.
    assert ngram.ceiling == pytest.approx((12 / 0.120) / (15 / 0.450))
    assert (ngram.acceptance, ngram.accepted_length) == (0.75, 4.0)
    assert (ngram.hit_rate, ngram.hit_rate_all) == (0.75, 0.75)
    assert (ngram.first_token_ms, ngram.draft_wait_ms) == (50.0, 2.0)
    assert ngram.by_depth == (1.0, 1.0, 1.0)
    assert (ngram.texts, ngram.differences) == (4, ())
    assert row.best == "", "auto is not there"


def test_a_ceiling_is_unknown_where_no_step_was_timed() -> None:
    groups, _ = fakes()
    turns = [
        replace(turn, runs={name: replace(run, target_s=0.0) for name, run in turn.runs.items()})
        for turn in measured(plan(), groups)
    ]
    rows = speed_rows(turns)
    assert rows[0].settings["ngram"].ceiling == 0
    assert "| ? | ? |" in speed_markdown(rows)


def mutated_rows(acceptance: Acceptance, temperature: float) -> tuple[list[SpeedRow], str]:
    """The report of services whose drafted text leaves target-only's at token 5."""
    groups, _ = fakes(drafted_text=(0, 1, 2, 3, 4, 99, *range(6, 16)))
    settings = drafter_settings(("model:x",), (acceptance,), COUNTS)
    groups.pop("ngram")
    rows = speed_rows(measured(plan(settings=settings, temperatures=(temperature,)), groups))
    return rows, speed_markdown(rows)


@pytest.mark.parametrize(("acceptance", "temperature"), [(Acceptance.COUPLED, 1.0), (Acceptance.BLOCK, 0.0)])
def test_another_text_is_reported_with_its_first_token(acceptance: Acceptance, temperature: float) -> None:
    (row,), text = mutated_rows(acceptance, temperature)
    name = short_name("model:x", acceptance)
    assert row.settings[name].differences == (("a", 0, 5), ("b", 1, 5), ("a", 2, 5), ("b", 3, 5))
    assert "| 0 of 4 |" in text
    assert f"- chat T={temperature:g} {name}: prompt a, pass 0, from token 5" in text


def test_texts_are_held_against_target_only_on_the_same_services() -> None:
    """Other threads add floats in another order: that is no other text of the drafter's."""
    text = (9, *range(1, 16))
    groups, _ = fakes(text=text, drafted_text=text)
    (row,) = speed_rows(measured(plan(), groups))
    assert row.settings["model:x"].differences == ()
    assert row.settings["ngram"].differences == ()


def test_rejection_at_a_temperature_promises_a_distribution_and_no_text() -> None:
    (row,), text = mutated_rows(Acceptance.REJECTION, 1.0)
    figures = row.settings["model:x rejection"]
    assert (figures.texts, figures.differences) == (0, ())
    assert "| only the distribution |" in text


def test_first_difference() -> None:
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def test_plots_have_a_bar_for_each_setting_and_kind_with_its_ceiling(tmp_path: Path) -> None:
    groups, _ = fakes()
    cold, warm = speed_plots(speed_rows(measured(plan(temperatures=(0.0, 1.0)), groups)))
    assert [bars.label for bars in cold.bars] == [AGAIN, "ngram", "model:x", SPLIT]
    assert [value.median for bars in warm.bars for value in bars.values if value] == [1.0, 2.5, 2.5, 1.0]
    assert list(cold.bars[1].marks) == [pytest.approx(3.0)]
    draw(cold, tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").read_text().startswith("<?xml")


@dataclass
class LengthsRunner:
    """Ten tokens per second without drafts, twenty with two, `auto` as told by prompt."""

    auto: dict[str, float]
    calls: list[GenerateRequest] = field(default_factory=list)
    name = "auto"
    target_threads = 2
    processes = ()
    split = "target 2"

    def generate(self, request: GenerateRequest) -> Generation:
        self.calls.append(request)
        asked = request.speculation
        if asked.off:
            return generation(range(6), [record(1, 0)] * 6, 10.0)
        if asked.num_draft_tokens == 2:
            return generation(range(6), [record(3, 2)] * 2, 20.0)
        speed = self.auto[request.messages[-1].content]
        return generation(range(6), [record(3, 2)] * (2 if speed else 1), speed)


SPEEDS = {"a": 18.0, "b": 22.0, "c": 5.0}
FIXED = [PLAIN, AGAIN, "k=2", "auto"]


def fixed_plan(**changes: object) -> SpeedPlan:
    prompts = {"chat": (prompt("a"), prompt("b")), "code": (prompt("c", "code"),)}
    settings = fixed_settings(("auto",), RULES, COUNTS, (0, 2), ())
    return plan(**{"prompts": prompts, "settings": settings, "pairs": 2, "tokens": 6, **changes})


def fixed(lengths: LengthsRunner, **options: object) -> list[SpeedTurn]:
    turns: list[SpeedTurn] = []
    run_speed(fixed_plan(), {"auto": lengths}, turns.append, **options)  # type: ignore[arg-type]
    return turns


def test_a_short_generation_with_the_longest_proposals_comes_before_each_turn() -> None:
    fake = LengthsRunner(SPEEDS)
    assert all(list(turn.runs) == FIXED for turn in fixed(fake))
    primings = fake.calls[len(FIXED) :][:: 1 + len(FIXED)]
    assert [call.messages[0].content for call in primings] == ["a", "c", "b", "c"]
    assert {call.max_new_tokens for call in primings} == {2}
    assert all(call.speculation.num_draft_tokens == 2 for call in primings)


def test_no_pass_begins_after_the_time_and_the_one_that_runs_is_ended() -> None:
    turns = fixed(LengthsRunner(SPEEDS), until=0.0)
    assert [(turn.kind, turn.prompt, turn.number) for turn in turns] == [("chat", "a", 0), ("code", "c", 0)]


def test_every_figure_of_auto_beside_fixed_settings() -> None:
    chat, code = speed_rows(fixed(LengthsRunner(SPEEDS)))
    auto = chat.settings["auto"]
    assert (chat.turns, chat.settings[PLAIN].speed.median, chat.noise.median) == (2, 10.0, 1.0)
    assert (chat.best, chat.settings["k=2"].ratio.median) == ("k=2", 2.0)
    assert (auto.ratio.median, auto.ratio.low, chat.worst) == (2.0, 1.8, "a")
    assert chat.over_best.median == pytest.approx(1.0)
    assert {name: one.accepted_length - 1 for name, one in chat.settings.items()} == {
        **{PLAIN: 0.0, AGAIN: 0.0, "k=2": 2.0, "auto": 2.0}
    }
    # 5 of 6 rounds' steps of 30 ms for 5 tokens, one step of 40 ms for the 3 tokens behind the first round.
    assert auto.ceiling == pytest.approx((3 / 0.040) / (5 / 0.150))
    assert (code.settings["auto"].ratio.median, code.over_best.median) == (0.5, 0.25)


def test_the_summary_names_the_least_row() -> None:
    text = speed_markdown(speed_rows(fixed(LengthsRunner(SPEEDS))))
    assert "- auto ÷ best fixed, over 2 rows: least 0.250 (code, T=0), median 0.625" in text
    assert "- auto ÷ target-only, over 2 rows: least 0.500 (code, T=0), median 1.250" in text
    assert "- noise (target-only ÷ target-only), over 2 rows: least 1.000" in text
    assert (
        "| code | 0 | 1.00 (1.00 to 1.00) | k=2: 2.00 | 0.50 (0.50 to 0.50) | 0.25 (0.25 to 0.25) | c: 0.50 |" in text
    )


def test_answers_too_short_to_have_a_speed_are_counted_and_left_out() -> None:
    rows = speed_rows(fixed(LengthsRunner(SPEEDS | {"a": 0.0, "c": 0.0})))
    assert [(row.kind, row.turns, row.short_turns) for row in rows] == [("chat", 1, 1)]
    assert "1 (1 too short)" in speed_markdown(rows)
    assert "No answer was long enough" in speed_markdown([])


def test_the_report_can_be_made_again_from_its_json() -> None:
    groups, _ = fakes()
    for turns in (fixed(LengthsRunner(SPEEDS)), measured(plan(), groups)):
        rows = speed_rows(turns)
        values = json.loads(json.dumps(speed_json(rows, turns)))
        again = [SpeedTurn.of_json(value) for value in values["turns"]]
        assert again == turns
        assert speed_rows(again) == rows


def test_a_report_is_gone_on_with_by_the_same_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = LengthsRunner(SPEEDS)
    monkeypatch.setattr(command, "running_groups", lambda *_: nullcontext({"auto": fake}))
    services = MeasuredServices(TARGET)

    def measure(wanted: SpeedPlan) -> list[str]:
        command.measure_speed(services, wanted, math.inf, tmp_path, "lengths", add=True)
        (report,) = tmp_path.glob("lengths-*.json")
        return [turn["prompt"] for turn in json.loads(report.read_text())["turns"]]

    assert measure(fixed_plan(pairs=1)) == ["a", "c"]
    calls = len(fake.calls)
    assert measure(fixed_plan(pairs=2)) == ["a", "c", "b", "c"]
    assert len(fake.calls) - calls == len(FIXED) + 2 * 5, "the warm-up and two turns"
    with pytest.raises(InvalidInput, match=r"tokens of each generation in .* = '6': must be '7', as now"):
        measure(fixed_plan(tokens=7))


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
    if offered:
        named = fixed_settings((drafter,), RULES, COUNTS, (), offered)
        assert list(named) == [PLAIN, AGAIN, *(name.rpartition("/")[2] for name in offered), "auto"]
        assert {setting.group for setting in named.values()} == {drafter}


def test_every_drafter_has_services_of_its_own_and_none_is_there_anyway() -> None:
    settings = drafter_settings(split_drafters("none,auto:/home/x/d"), tuple(Acceptance), (None, 3))
    assert list(settings)[:4] == [PLAIN, AGAIN, "auto:d", "auto:d k=3"]
    assert len(settings) == 2 + 2 * len(Acceptance)
    assert settings[PLAIN] == settings[AGAIN]
    assert {setting.group for setting in settings.values()} == {"none", "auto:/home/x/d"}
    asked = settings["auto:d k=3"].speculation
    assert (asked.drafter, asked.num_draft_tokens) == ("auto", 3)
    assert split_drafters(f"{NEAR},model") == (NEAR, "model"), "at their own commas"


def test_every_kind_has_eight_prompts_with_names_and_texts_of_their_own() -> None:
    prompts = load_prompts()
    assert tuple(prompts) == KINDS
    assert {len(of_kind) for of_kind in prompts.values()} == {8}
    names = [(one.kind, one.name) for of_kind in prompts.values() for one in of_kind]
    assert len(set(names)) == len(names)
    assert len({one.chats for of_kind in prompts.values() for one in of_kind}) == len(names)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--kind", "poem"], ("kind", "'poem'", "chat")),
        (["--drafter", "oracle"], ("drafter", "'oracle'", "ngram")),
        (["--temperature", "warm"], ("temperature", "'warm'", "numbers")),
        (["--acceptance", "lenient"], ("acceptance", "'lenient'", "coupled")),
        (["--num-draft-tokens", "many"], ("num_draft_tokens", "'many'", "whole numbers")),
        (["--num-draft-tokens", "65"], ("num_draft_tokens", "65", "[0, 64]")),
        (["--pairs", "0"], ("pairs", "0", "[1, ")),
        (["--tokens", "1"], ("tokens", "1")),
        (["--temperature", "-1"], ("temperature", "-1.0")),
        (["--k", "2", "--drafter", "ngram,auto"], ("drafter", "'ngram,auto'", "one drafter")),
        (["--k", "2", "--drafter", "none"], ("drafter", "'none'")),
        (["--k", "2", "--num-draft-tokens", "3"], ("num_draft_tokens", "3", "auto")),
        (["--k", ""], ("k", "one number")),
        (["--minutes", "0"], ("minutes", "0", "above 0")),
        (["--url", "127.0.0.1:1", "--quantization", "int8"], ("quantization", "'int8'", "--url")),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: tuple[str, ...]) -> None:
    result = runner.invoke(app, ["bench", "speed", TARGET, *arguments])
    assert result.exit_code == 2
    assert all(part in result.stderr for part in named), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def measured_services(folder: Path, *arguments: str) -> tuple[Any, str, str]:
    """A run of the command: its JSON report, its Markdown report, and what it said on stderr."""
    result = runner.invoke(app, ["bench", "speed", TARGET, *arguments, "--tokens", "12", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    (text,) = folder.glob("speed-*.md")
    return json.loads(next(folder.glob("speed-*.json")).read_text()), text.read_text(), result.stderr


def test_the_command_measures_real_services_and_writes_both_files(tmp_path: Path) -> None:
    options = ["--num-draft-tokens", "3", "--temperature", "1", "--kind", "copy", "--pairs", "1"]
    values, text, _ = measured_services(tmp_path, "--drafter", NEAR, *options)
    assert values["facts"]["model"] == TARGET
    (row,) = values["results"]
    assert len(row["settings"]) == 3
    assert all(one["texts"] - len(one["differences"]) == 1 for one in row["settings"].values())
    assert all(one["speed"]["median"] > 0 for one in row["settings"].values())
    assert row["settings"][f"{NEAR} k=3"]["accepted_length"] > 1
    assert all(fact in text for fact in ("- commit:", "- machine:", "- compute threads: none: target", "- torch:"))
    assert f"| copy | 1 | {NEAR} k=3 | 1 |" in text


def test_a_running_coordinator_is_measured_where_it_is(tmp_path: Path) -> None:
    settings = ServeSettings(model=TARGET, port=0, draft_port=0, target_port=0)
    with SupervisedServices(settings, tmp_path / "services") as services:
        where = ["--url", services.address, "--out", str(tmp_path), "--name", "remote"]
        result = runner.invoke(app, ["bench", "speed", "--kind", "chat", "--pairs", "1", "--tokens", "8", *where])
    assert result.exit_code == 0, result.output
    text = next(tmp_path.glob("remote-*.md")).read_text()
    assert "- compute threads: none: unknown; ngram: unknown" in text


@pytest.mark.full
def test_each_drafter_alone_beside_auto(tmp_path: Path) -> None:
    drafts = f"auto:{TARGET},noise=0.2+{TARGET},noise=0.4"
    options = ["--alone", "--k", "2", "--kind", "code", "--pairs", "1"]
    values, text, _ = measured_services(tmp_path, "--drafter", drafts, *options)
    (turn,) = values["turns"]
    assert list(turn["runs"]) == [
        *(PLAIN, AGAIN, "k=2", "ngram k=2", "model k=2", f"model:{TARGET},noise=0.4 k=2"),
        *("ngram", "model", f"model:{TARGET},noise=0.4", "auto"),
    ]
    assert all(run["difference"] is None for run in turn["runs"].values())
    assert "rounds that accept" in text


def test_the_command_compares_on_one_group_of_services(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question_id": n, "category": "river", "turns": [f"Which river {n}?"]}) for n in range(2)]
    questions.write_text("\n".join(lines))
    options = ("--drafter", f"auto:{TARGET},noise=0.2", "--k", "0,2", "--prompts", str(questions), "--pairs", "2")
    values, _, progress = measured_services(tmp_path, *options)
    assert progress.count("starting services") == 1
    assert [turn["prompt"] for turn in values["turns"]] == ["0", "1"]
    assert all(list(turn["runs"]) == FIXED for turn in values["turns"])
    assert all(run["difference"] is None for turn in values["turns"] for run in turn["runs"].values())
    assert all(turn["runs"]["k=2"]["accepted"] > 0 for turn in values["turns"])
