"""`bench speed`: what runs in which order, what the report says of it, and that it would notice another text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.local.settings import ServeSettings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import ChatMessage, GenerateRequest
from paceline.protocol.proposal import Acceptance
from paceline_lab.bench.prompts import KINDS, Prompt, load_prompts
from paceline_lab.bench.speed.groups import GenerationRunner
from paceline_lab.bench.speed.report import (
    SpeedRow,
    TargetStepCosts,
    speed_json,
    speed_markdown,
    speed_plots,
    speed_rows,
)
from paceline_lab.bench.speed.run import SpeedPair, SpeedPlan, SpeedRun, Variant, first_difference, run_speed
from paceline_lab.commands.bench import split_drafters
from paceline_lab.reporting.presentation import draw
from tests.lab.fakes import FakeRunner, generation, record

TARGET = "table:vocab=300,seed=1"
NEAR = f"model:{TARGET},noise=0.2"

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "PACELINE_HOME": ""})


def prompt(name: str) -> Prompt:
    return Prompt("chat", name, ((ChatMessage("user", name),),))


def plan(**changes: object) -> SpeedPlan:
    fields: dict[str, object] = {
        "prompts": {"chat": (prompt("a"), prompt("b"))},
        "variants": (Variant("ngram"), Variant("model:x")),
        "pairs": 4,
        "tokens": 16,
    }
    return SpeedPlan(**(fields | changes))  # type: ignore[arg-type]


def fakes(**changes: object) -> tuple[dict[str, GenerationRunner], list[tuple[str, GenerateRequest]]]:
    calls: list[tuple[str, GenerateRequest]] = []
    groups: dict[str, GenerationRunner] = {
        "none": FakeRunner("none", 2, calls),
        "ngram": FakeRunner("ngram", 2, calls),
        "model:x": FakeRunner("model:x", 1, calls, **changes),  # type: ignore[arg-type]
    }
    return groups, calls


def described(calls: list[tuple[str, GenerateRequest]]) -> list[str]:
    return [
        f"{name} {'off' if call.speculation.off else 'on'} {call.messages[0].content} {call.seed}"
        for name, call in calls
    ]


def test_target_only_runs_beside_every_drafter_and_every_second_turn_of_a_prompt_backwards() -> None:
    groups, calls = fakes()
    pairs = run_speed(plan(), groups)
    assert described(calls[3:]) == [  # after one warm-up of each group
        *("none off a 0", "ngram on a 0"),
        *("none off a 0", "model:x off a 0", "model:x on a 0"),
        *("ngram on b 1", "none off b 1"),
        *("model:x on b 1", "model:x off b 1", "none off b 1"),
        *("ngram on a 2", "none off a 2"),
        *("model:x on a 2", "model:x off a 2", "none off a 2"),
        *("none off b 3", "ngram on b 3"),
        *("none off b 3", "model:x off b 3", "model:x on b 3"),
    ]
    assert len(pairs) == len(plan()) == 8
    assert all(call.ignore_eos and call.max_new_tokens == 16 for _, call in calls[3:])


def test_answers_that_end_run_one_after_the_other_and_count_once() -> None:
    ends = Prompt("json", "short", ((ChatMessage("user", "1"),), (ChatMessage("user", "2"),)), ends=True)
    groups, calls = fakes()
    (pair,) = run_speed(plan(prompts={"json": (ends,)}, pairs=1, variants=(Variant("ngram"),)), groups)
    assert described(calls[2:]) == ["none off 1 0", "none off 2 0", "ngram on 1 0", "ngram on 2 0"]
    assert not any(call.ignore_eos for _, call in calls[2:])
    assert len(pair.drafted.token_ids) == 32
    assert pair.drafted.tokens_per_second == pytest.approx(50)


def test_every_figure_of_the_report() -> None:
    groups, _ = fakes()
    pairs = run_speed(plan(), groups)
    rows = speed_rows(pairs, TargetStepCosts.of(pairs, groups))
    ngram, model = rows
    assert (ngram.kind, ngram.variant, ngram.pairs, ngram.tokens) == ("chat", "ngram", 4, 64)
    assert (ngram.plain.median, ngram.drafted.median, ngram.split.count) == (20.0, 50.0, 0)
    assert (model.split.median, model.split.count, model.split_ratio.median) == (20.0, 4, 2.5)
    assert (ngram.ratio.median, ngram.ratio_lower) == (2.5, 2.5)
    assert ngram.ceiling == pytest.approx(4 * 30 / 40)
    assert ngram.ceiling_share == pytest.approx(2.5 / 3)
    assert (ngram.acceptance, ngram.mean_accepted_length, ngram.tokens_per_round) == (0.75, 4.0, 4.0)
    assert (ngram.hit_rate, ngram.hit_rate_all) == (0.75, 0.75)
    assert (ngram.first_token_ms.median, ngram.output_token_ms.median) == (50.0, 20.0)
    assert (ngram.draft_wait_ms_p50, ngram.verify_ms_p50, ngram.plain_verify_ms_p50) == (2.0, 41.0, 31.0)
    assert (ngram.texts_compared, ngram.differences) == (4, ())


def test_the_ceiling_with_all_cores_is_unknown_where_no_such_step_was_measured() -> None:
    groups, _ = fakes()
    pairs = run_speed(plan(variants=(Variant("model:x"),)), groups)
    (row,) = speed_rows(pairs, TargetStepCosts.of(pairs, groups))
    assert row.ceiling == pytest.approx(3)
    assert row.ceiling_all_cores == 0


def mutated_rows(acceptance: Acceptance, temperature: float) -> tuple[list[SpeedRow], str]:
    """The report of services whose drafted text leaves target-only's at token 5."""
    groups, _ = fakes(drafted_text=(0, 1, 2, 3, 4, 99, *range(6, 16)))
    wanted = plan(variants=(Variant("model:x", acceptance),), temperatures=(temperature,))
    pairs = run_speed(wanted, groups)
    costs = TargetStepCosts.of(pairs, groups)
    rows = speed_rows(pairs, costs)
    return rows, speed_markdown(rows, costs)


@pytest.mark.parametrize(("acceptance", "temperature"), [(Acceptance.COUPLED, 1.0), (Acceptance.BLOCK, 0.0)])
def test_another_text_is_reported_with_its_first_token(acceptance: Acceptance, temperature: float) -> None:
    (row,), text = mutated_rows(acceptance, temperature)
    assert row.differences == (("a", 0, 5), ("b", 1, 5), ("a", 2, 5), ("b", 3, 5))
    assert "| 0 of 4 |" in text
    assert f"- chat T={temperature:g} {row.variant}: prompt a, pass 0, from token 5" in text


def test_rejection_at_a_temperature_promises_a_distribution_and_no_text() -> None:
    (row,), text = mutated_rows(Acceptance.REJECTION, 1.0)
    assert (row.texts_compared, row.differences) == (0, ())
    assert "| only the distribution |" in text


def test_first_difference() -> None:
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def test_the_first_rounds_tokens_are_not_counted_as_decoded() -> None:
    run = SpeedRun.of([generation(range(7), [record(5, 3), record(5, 2)], 30.0)], 1.0)
    assert run.decoded_tokens == 3
    assert run.decode_s == pytest.approx(0.1)


def test_json_holds_each_pair(tmp_path: Path) -> None:
    groups, _ = fakes()
    pairs: list[SpeedPair] = []
    run_speed(plan(), groups, pairs.append)
    costs = TargetStepCosts.of(pairs, groups)
    values = json.loads(json.dumps(speed_json(speed_rows(pairs, costs), pairs, costs)))
    assert values["row_costs_ms"] == {"1": {"1": 30.0, "5": 40.0}, "2": {"1": 30.0, "5": 40.0}}
    assert [pair["drafted_first"] for pair in values["pairs"]] == [False] * 2 + [True] * 4 + [False] * 2
    assert set(values["pairs"][1]["runs"]) == {"plain", "drafted", "split"}


def test_plots_have_a_bar_for_each_drafter_and_kind_with_its_ceiling(tmp_path: Path) -> None:
    groups, _ = fakes()
    pairs = run_speed(plan(temperatures=(0.0, 1.0)), groups)
    cold, warm = speed_plots(speed_rows(pairs, TargetStepCosts.of(pairs, groups)))
    assert [bars.label for bars in cold.bars] == ["ngram", "model:x"]
    assert [value.median for bars in warm.bars for value in bars.values if value] == [2.5, 2.5]
    assert list(cold.bars[0].marks) == [3.0]
    draw(cold, tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").read_text().startswith("<?xml")


def test_every_kind_has_eight_prompts_with_names_and_texts_of_their_own() -> None:
    prompts = load_prompts()
    assert tuple(prompts) == KINDS
    assert {len(of_kind) for of_kind in prompts.values()} == {8}
    names = [(one.kind, one.name) for of_kind in prompts.values() for one in of_kind]
    assert len(set(names)) == len(names)
    assert len({one.chats for of_kind in prompts.values() for one in of_kind}) == len(names)


def test_drafters_are_split_at_their_own_commas() -> None:
    assert split_drafters(f"none,ngram,{NEAR},auto:d,model") == ("none", "ngram", NEAR, "auto:d", "model")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pairs": 0}, "pairs = 0"),
        ({"tokens": 1}, "tokens = 1"),
        ({"temperatures": (-1.0,)}, "temperature = -1.0"),
        ({"temperatures": ()}, "temperature"),
    ],
)
def test_bad_plans_name_field_value_and_limit(change: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        plan(**change)


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
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: tuple[str, ...]) -> None:
    result = runner.invoke(app, ["bench", "speed", TARGET, *arguments])
    assert result.exit_code == 2
    assert all(part in result.stderr for part in named), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_command_measures_real_services_and_writes_both_files(tmp_path: Path) -> None:
    arguments = [
        "--drafter",
        NEAR,
        "--num-draft-tokens",
        "3",
        "--temperature",
        "0,1",
        "--kind",
        "copy",
        "--pairs",
        "1",
    ]
    result = runner.invoke(app, ["bench", "speed", TARGET, *arguments, "--tokens", "12", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (report,) = tmp_path.glob("speed-*.md")
    values = json.loads(next(tmp_path.glob("speed-*.json")).read_text())
    assert values["facts"]["model"] == TARGET
    assert [row["texts_compared"] - len(row["differences"]) for row in values["results"]] == [1] * 2
    assert all(row["drafted"]["median"] > 0 and row["plain"]["median"] > 0 for row in values["results"])
    assert all(row["tokens_per_round"] > 1 for row in values["results"])
    text = report.read_text()
    assert all(fact in text for fact in ("- commit:", "- machine:", "- compute threads: none: target", "- torch:"))
    assert "| copy | 1 | model:" in text


def test_a_running_coordinator_is_measured_where_it_is(tmp_path: Path) -> None:
    settings = ServeSettings(model=TARGET, port=0, draft_port=0, target_port=0)
    with SupervisedServices(settings, tmp_path / "services") as services:
        where = ["--url", services.address, "--out", str(tmp_path), "--name", "remote"]
        result = runner.invoke(app, ["bench", "speed", "--kind", "chat", "--pairs", "1", "--tokens", "8", *where])
    assert result.exit_code == 0, result.output
    text = next(tmp_path.glob("remote-*.md")).read_text()
    assert "- compute threads: none: unknown; ngram: unknown" in text


def test_nobody_at_the_address_is_one_line() -> None:
    result = runner.invoke(app, ["bench", "speed", "--url", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr
