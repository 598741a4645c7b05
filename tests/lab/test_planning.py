"""`paceline plan` on table models, as a user calls it; what is wrong is named, and reasoning is told from answers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.costs.cost_line import CostLine
from paceline.engine.table.engine import load_table
from paceline.models.tokenizer import load_tokenizer
from paceline_lab.plan.document import ReportPart, as_html, as_markdown_text
from paceline_lab.plan.options import PlanOptions, TimesOptions, drafters_named
from paceline_lab.plan.readers import LoadedReaders, least_line
from paceline_lab.plan.reasoning import reasoning_parts
from paceline_lab.plan.report import report_parts
from paceline_lab.plan.run import compare_settings
from paceline_lab.plan.times import step_times
from paceline_lab.plan.traces import traced_draft, traced_matches
from paceline_lab.predict.cycle import StepTimes, draft_time_ms
from paceline_lab.predict.positions import TargetPositions, TextPositions
from paceline_lab.predict.published import SIZES
from paceline_lab.predict.reading import EnginePasses, shown_name
from paceline_lab.predict.roofline import ModelPlacement
from paceline_lab.predict.rounds import ProposalShape, expected_rounds
from paceline_lab.predict.sample import SampleOptions
from paceline_lab.predict.verdict import Candidates
from paceline_lab.simulate.trace import Trace, TracedRequest, TracedSetting, write_trace
from paceline_training.corpus import Role, Row, save_shard
from tests.lab.predict.made_positions import made_positions

TARGET = "table:vocab=300,seed=1,sharpness=6,max_length=200"
TRACE = "run.jsonl"
DRAFT = "table:vocab=300,seed=1,sharpness=6,noise=0.15,noise_seed=2,max_length=200"


def sample_of(folder: Path, *prompts: str) -> Path:
    file = folder / "sample.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return file


def plan(folder: Path, *options: str, target: str = TARGET, sample: Path | None = None) -> Any:
    file = sample or sample_of(folder, "one", "two")
    arguments = ["plan", target, "--sample", str(file), "--out", str(folder / "out"), "--k", "1,2,3:2"]
    of_texts = () if sample is not None and sample.name == TRACE else ("--answer-tokens", "24")
    return CliRunner().invoke(app, [*arguments, *of_texts, *options])


def test_a_plan_is_written_resumed_and_stands_alone(tmp_path: Path) -> None:
    lines = ("--drafter", DRAFT, "--target-line", "1:20,9:24", "--draft-line", "1:1", "--temperature", "0.8")
    made = plan(tmp_path, *lines, "--sessions", "1,8", "--target-price", "36", "--traffic", "1000")
    assert made.exit_code == 0, made.stderr
    assert "with table:" in made.stdout and "(predicted)" in made.stdout
    out = tmp_path / "out"
    text, page = (out / "plan.md").read_text(), (out / "plan.html").read_text()
    assert "8 requests at once" in text and "predicted" in text and "target step: stated" in text
    assert "MODELLED" not in text and "Modelled" not in text
    assert page.count("<svg") == 3
    assert not re.search(r"(src|href)=.(?!#)|url\((?!#)|@import", page)  # nothing outside the page
    again = plan(tmp_path, *lines)
    assert again.exit_code == 2 and "--resume" in again.stderr
    kept = sorted((out / "work" / "positions").glob("*.npz"))
    before = [file.stat().st_mtime_ns for file in kept]
    assert len(kept) == 6  # two texts, each by the target, matches and the draft
    resumed = plan(tmp_path, *lines, "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert [file.stat().st_mtime_ns for file in kept] == before
    other = plan(tmp_path, *lines, "--resume", "--seed", "5")
    assert other.exit_code == 2 and "seed" in other.stderr


def test_each_bar_ends_at_its_total(tmp_path: Path) -> None:
    uneven = sample_of(tmp_path, "one", "one much longer prompt, whose answer has no more tokens for that")
    made = plan(tmp_path, "--drafter", "ngram", "--target-line", "1:20,9:24", "--temperature", "0.8", sample=uneven)
    bars = re.findall(r": (\d+) of (\d+),", made.stderr)
    assert len(bars) == 2, made.stderr
    assert all(done == total for done, total in bars), bars


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--drafter", "default"), "default"),
        (("--drafter", "ngram:x"), "drafter"),
        (("--k", "0"), "one above 0"),
        (("--sessions", "0"), "sessions"),
        (("--temperature", "-1"), "temperature"),
        (("--target-line", "1:x"), "target_line"),
        (("--gpu", "h300", "--target-size", "llama-3.1-8b"), "gpu"),
        (("--gpu", "h100", "--target-size", "nothing-of-that-name/config.json"), "target_size"),
        (("--drafter", DRAFT, "--drafter", DRAFT), "drafter"),
        (("--gpu", "h100"), "target_size"),
        (("--target-size", "qwen3-8b"), "without --gpu"),
        (("--traffic", "-1"), "traffic"),
        (("--weights", "4-bit"), "weights = '4-bit': must be left out without --gpu"),
        (("--context", "2000"), "context = 2000: must be left out without --gpu or --draft-gpu"),
        (("--drafter", DRAFT, "--draft-line", "TYPO=1:5"), "draft_line = 'TYPO': must be one of: table:"),
        (("--drafter", DRAFT, "--draft-line", "1:5", "--draft-line", f"{DRAFT}=1:5"), "draft_line = ''"),
        (("--drafter", "ngram", "--draft-line", "1:5"), "draft_line = '': must be left out"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, options: tuple[str, ...], named: str) -> None:
    found = plan(tmp_path, *options)
    assert found.exit_code in (1, 2) and named in found.stderr
    assert found.stderr.strip().splitlines()[-1].startswith("paceline: error: ")


def test_wrong_samples_are_named(tmp_path: Path) -> None:
    assert "readable" in plan(tmp_path, sample=tmp_path / "none.jsonl").stderr
    row = Row(np.full(40, 299, np.int32), np.full(40, Role.ANSWER, np.int8), 1.0)
    save_shard(tmp_path / "other.npz", [row], 300)
    refused = plan(tmp_path, target="table:vocab=280,seed=1,max_length=200", sample=tmp_path / "other.npz").stderr
    assert "data token id = 299: must be below 280" in refused


def test_a_trace_of_running_services_is_a_sample(tmp_path: Path) -> None:
    request = TracedRequest((0,), (*range(1, 47), 1, 2), (1, 1, 2, 1) * 12, (0.9,) * 48)
    notes = {"model": TARGET, "drafter": "model:small", "temperature": "0.8"}
    setting = TracedSetting(CostLine(((1, 20.0),)), draft=CostLine(((1, 1.0),)), coordinator_ms=0.5, notes=notes)
    write_trace(tmp_path / TRACE, Trace(setting, (request,)))
    made = plan(tmp_path, target="", sample=tmp_path / TRACE)
    assert made.exit_code == 0, made.stderr
    text = (tmp_path / "out" / "plan.md").read_text()
    assert f"Plan for {TARGET}" in text
    assert "a trace of 1 requests" in text and "What the drafters say" not in text
    assert "Temperature 0.8" in made.stdout and "model:small" in made.stdout
    for option, named in (
        (("--gpu", "h100"), "times"),
        (("--target-url", "127.0.0.1:1", "--draft-url", "127.0.0.1:2"), "target_url"),
        (("--temperature", "0"), "temperature"),
        (("--texts", "3"), "texts"),
        (("--answer-tokens", "9"), "answer_tokens"),
        (("--seed", "1"), "seed"),
    ):
        said = plan(tmp_path, *option, sample=tmp_path / TRACE).stderr
        assert "left out with a trace" in said and f"error: {named} = " in said
    other = plan(tmp_path, target="table:vocab=9", sample=tmp_path / TRACE)
    assert f"target = 'table:vocab=9': must be {TARGET}, of which the trace is" in other.stderr
    rounds = expected_rounds([traced_draft(request)], ProposalShape(1))
    assert rounds.tokens == pytest.approx(simulated_tokens(request.ranks, 1), abs=0.05)
    matches = traced_matches(request)
    assert matches.offered.tolist() == [0] * 47 + [32] and matches.reach.sum() == matches.reach[47, 0].sum() == 8


@pytest.mark.parametrize(
    "beside",
    [
        CostLine(((1, 20.0),)),
        *(pytest.param(each, marks=pytest.mark.full) for each in (CostLine(), CostLine(((1, 25.0),)))),
    ],
)
def test_drafts_of_a_trace_have_hardware_of_their_own_only_if_that_is_said(tmp_path: Path, beside: CostLine) -> None:
    """A target says `beside` as `alone` until a draft was at work beside a step, on whatever cores."""
    setting = TracedSetting(CostLine(((1, 20.0),)), beside=beside, draft=CostLine(((1, 1.0),)))
    write_trace(tmp_path / TRACE, Trace(setting, (TracedRequest((0,), (1,) * 9, (1,) * 9, (0.9,) * 9),)))
    for said, options in (("drafts share the target's", ()), ("drafts on hardware of their own", ("--apart",))):
        made = plan(tmp_path, *options, sample=tmp_path / TRACE)
        assert made.exit_code == 0, made.stderr
        text = (tmp_path / "out" / "plan.md").read_text()
        assert said in text
        assert (", ahead |" in text) == bool(options)


def test_what_has_no_texts_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    setting = TracedSetting(CostLine(((1, 20.0),)))
    write_trace(tmp_path / TRACE, Trace(setting, (TracedRequest((0,), (1,), (1,), (0.9,)),)))
    refused = CliRunner().invoke(app, ["branches", "no-such-model", "--sample", str(tmp_path / TRACE)])
    said = " ".join(refused.stderr.split())
    assert "neither its id" in said and "nor their probabilities" in said
    assert "paceline branches TARGET --drafter DRAFT --sample PROMPTS.jsonl" in said
    assert f"paceline plan --sample {tmp_path / 'run.jsonl'}" in said
    (tmp_path / "timeline.json").write_text('{"traceEvents": []}')
    assert "must be a .jsonl of prompt, messages or text" in plan(tmp_path, sample=tmp_path / "timeline.json").stderr


def simulated_tokens(ranks: tuple[int, ...], k: int) -> float:
    at = rounds = 0
    while at < len(ranks):
        rounds += 1
        at += 1 + next((depth for depth in range(k) if ranks[min(at + depth, len(ranks) - 1)] != 1), k)
    return at / rounds


def test_modelled_times_are_marked_wherever_they_are_shown(tmp_path: Path) -> None:
    of_target = ("--gpu", "h100", "--tp", "4", "--target-size", "qwen3-32b")
    of_draft = ("--draft-gpu", "l4", "--draft-size", "qwen3-0.6b")
    made = plan(tmp_path, "--drafter", DRAFT, "--temperature", "0.8", *of_target, *of_draft)
    assert made.exit_code == 0, made.stderr
    assert "Modelled, not measured: target step" in made.stdout
    text = (tmp_path / "out" / "plan.md").read_text()
    assert "MODELLED by roofline for 4 h100, bf16 of qwen3-32b's size, 1024 tokens of context; not measured" in text
    assert "gpt-fast" in text  # the published speeds that the roofline is held against
    assert ", ahead" in text  # drafts have hardware of their own


@pytest.mark.parametrize("sessions", [1, 16, 32])
def test_a_modelled_draft_reads_its_sessions_keys_and_values(tmp_path: Path, sessions: int) -> None:
    asked = TimesOptions(CostLine(((1, 20.0),)), draft_gpu="l4", draft_size="qwen3-0.6b", context=2000)
    options = PlanOptions(TARGET, SampleOptions(tmp_path), tmp_path / "out", times=asked)
    target = load_table(TARGET)
    readers = LoadedReaders(EnginePasses(target, {}), load_tokenizer(TARGET), {"d": DRAFT}, CostLine(), {})
    times = step_times(options, readers)
    assert "2000 tokens of context" in times.origins["d step"]
    place = ModelPlacement(SIZES["qwen3-0.6b"], "l4")
    expected = expected_rounds([made_positions([0.8] * 40)], ProposalShape(2))
    first, second = (place.step_ms(rows * sessions, sessions, 2000) for rows in (2, 1))
    assert draft_time_ms(times, "d", expected, sessions) == pytest.approx(first + second)
    assert draft_time_ms(times.slower(draft=2), "d", expected, sessions) == pytest.approx(2 * (first + second))


def test_a_line_is_the_least_of_what_was_measured_and_rises() -> None:
    lines = [
        CostLine(((1, 600.0), (8, 600.0))),
        CostLine(((1, 140.0), (8, 170.0))),
        CostLine(((1, 150.0), (2, 150.0))),
    ]
    assert least_line(lines).points == ((1, 140.0), (2, 150.0), (8, 170.0))
    falling = [CostLine(((1, 9.0), (8, 9.0))), CostLine(((8, 5.0),))]
    assert least_line(falling).points == ((1, 9.0), (8, 9.0))


def test_drafters_have_names_and_lines_of_their_own() -> None:
    assert drafters_named(["model:a", "ngram", "b/c/"], "t") == ("a", "b/c/")
    assert shown_name("b/c/") == "c"
    own, shared = CostLine(((1, 1.0),)), CostLine(((1, 2.0),))
    options = TimesOptions(draft_lines={"a": own, "": shared})
    assert (options.stated_line("a"), options.stated_line("b")) == (own, shared)
    assert TimesOptions().stated_line("a") is None


def test_a_page_escapes_what_users_wrote() -> None:
    part = ReportPart("<b>", ["a < b"], [[{"drafter": "<script>"}]], {"p": "<?xml?><svg></svg>"}, verdict=False)
    page = as_html("t", {"command": "x & y"}, [part])
    assert "<script>" not in page and "&lt;script&gt;" in page and "a &lt; b" in page
    assert "<svg></svg>" in page and "<?xml" not in page and "dont" in page
    assert "![p](p.svg)" in as_markdown_text("t", {}, [part])


def test_calibration_is_of_all_texts_together() -> None:
    """One text is righter than the drafter says by as much as the other is less right."""
    texts = [
        replace(made_positions([right] * 8), confidence=np.full(8, 0.55), offered=np.ones(8, np.int32))
        for right in (0.85, 0.25)
    ]
    none = np.zeros(8)
    target = TargetPositions(none, none, none, none, none, none, none, none, none)  # type: ignore[arg-type]
    read = [TextPositions(0.0, True, none, target, {"d": each}) for each in texts]  # type: ignore[arg-type]
    options = PlanOptions("t", SampleOptions(Path("s")), Path("nowhere"))
    times = StepTimes(CostLine(((1, 20.0),)), {"d": CostLine(((1, 1.0),))})
    made = compare_settings(options, {0.0: Candidates({"d": texts}, options.shapes)}, times, read)
    figures = next(part for part in report_parts(made) if part.title == "What the drafters say")
    assert figures.tables[0][0]["ECE"] == pytest.approx(0)


SHAPES = (ProposalShape(1), ProposalShape(4))
TIMES = StepTimes(
    CostLine(((1, 10.0), (64, 10.0))), {"draft": CostLine(((1, 1.0),))}, target_trip_ms=0.0, draft_trip_ms=0.0
)


def text(roles: list[Role], accepted: list[float]) -> TextPositions:
    count = len(roles)
    ids, figures = np.zeros(count, np.int32), np.zeros(count)
    target = TargetPositions(ids, np.array(roles, np.int8), ids, ids, ids, figures, figures, figures, figures)
    return TextPositions(0.0, True, np.zeros(count + 1, np.int32), target, {"draft": made_positions(accepted)})


def test_each_part_has_rounds_of_its_own() -> None:
    first = text([Role.THINKING] * 6 + [Role.ANSWER] * 12, [1.0] * 6 + [0.0] * 12)
    other = text([Role.ANSWER] * 2 + [Role.THINKING] * 14, [0.5] * 2 + [1.0] * 14)
    (part,) = reasoning_parts([first, other], SHAPES, TIMES)
    thinking, answer = part.tables[0]
    assert (thinking["part"], thinking["positions"], thinking["first"]) == ("reasoning", 20, 1.0)
    assert thinking["tokens a round"] == pytest.approx(20 / (2 + 3)), "6 sure tokens take two rounds, 14 take three"
    assert (answer["part"], answer["positions"]) == ("answer", 14)
    assert answer["first"] == pytest.approx(1 / 14)
    assert (thinking["fastest"], answer["fastest"]) == ("k=4", "k=1"), "sure tokens bear longer proposals"
    assert thinking["gain"] == pytest.approx(4 * 10 / (10 + 4 * 1)), "20 tokens in 5 rounds of 14 ms"
    assert isinstance(answer["gain"], float) and answer["gain"] < 1, "one token in 14 is worth no draft step of 1 ms"
    assert answer["tokens a round"] == pytest.approx(14 / (12 + 1.5)), "two tokens of .5 take one round or two"


def test_without_reasoning_nothing_is_told() -> None:
    assert not [*reasoning_parts([text([Role.ANSWER] * 8, [0.5] * 8)], SHAPES, TIMES)]
