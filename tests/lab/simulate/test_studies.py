"""Studies and ceilings beside arithmetic, and what a validation says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import InvalidInput
from paceline_lab.bench.validation import Deviation, ValidationCell, validation_text
from paceline_lab.simulate import ceiling
from paceline_lab.simulate.ceiling import (
    CeilingTrace,
    Proposing,
    ScriptedAnswer,
    ScriptedProposal,
    ceiling_rows,
    main,
)
from paceline_lab.simulate.studies import STUDIES, run_studies
from paceline_lab.simulate.studies.parts import MIDDLE, run
from paceline_lab.simulate.synthetic import SyntheticPair, synthetic_requests
from paceline_lab.simulate.trace import Trace, TracedRequest, TracedSetting, write_trace


def test_a_named_model_drafts_faster_than_it_decodes_alone() -> None:
    one = {"sessions": 2, "answer_tokens": {"median": 60}, "prompt_tokens": {"median": 8}}
    plain = run(MIDDLE.targets(1), one, k="0", seconds=1.0, warmup_seconds=0.5)
    drafted = run(MIDDLE.targets(1), one, drafts=MIDDLE.drafts(1), k="4+ahead", seconds=1.0, warmup_seconds=0.5)
    assert drafted.tokens_per_second > 1.3 * plain.tokens_per_second


def test_an_unknown_study_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="study = 'speed': must be all or one of drafts, zones"):
        run_studies("speed", None, 0)
    assert set(STUDIES) == {"drafts", "zones", "changes"}


def test_a_validation_counts_what_is_within_the_bar_or_the_noise_or_the_spread_of_the_cell() -> None:
    near, far = (Deviation(ValidationCell("table", 4, "4"), 100.0, speed, 0.0, 0.0, "1.0") for speed in (104.0, 94.0))
    text = validation_text([near, far])
    assert "Near: 1 of 2; near, or within its spread: 1." in text
    assert "+4.0%" in text
    assert "-6.0%" in text
    assert replace(far, noise=0.07).is_near
    spread = replace(far, spread=0.07)
    assert not spread.is_near
    assert "Near: 1 of 2; near, or within its spread: 2." in validation_text([near, spread])


SETTING = TracedSetting(
    alone=CostLine(((1.0, 20.0), (101.0, 40.0))), draft=CostLine(((1.0, 2.0), (101.0, 12.0)))
)  # .2 ms and .1 ms a row
PERFECT = synthetic_requests(SyntheticPair.even(1.0), 4, 256)
HOPELESS = synthetic_requests(SyntheticPair.even(0.0), 4, 256)
DRAFTS = Proposing(depth=3, least_chance=0.0)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "ROUNDS", 32)


def test_sessions_in_step_cost_all_of_their_rows() -> None:
    trace = CeilingTrace(SETTING, PERFECT)
    draft_ms, target_ms = 3 * SETTING.draft.ms(4), SETTING.alone.ms(4 * 4)
    assert trace.synchronous(4, DRAFTS) == pytest.approx(1e3 * 16 / (draft_ms + target_ms))
    assert trace.synchronous(4, Proposing()) == pytest.approx(1e3 * 4 / SETTING.alone.ms(4))


def test_halves_take_turns_and_the_longer_of_both_services_sets_the_pace() -> None:
    trace = CeilingTrace(SETTING, PERFECT)
    assert trace.alternating(4, DRAFTS) == pytest.approx(1e3 * 8 / SETTING.alone.ms(2 * 4))
    slow = CeilingTrace(replace(SETTING, draft=CostLine(((1.0, 30.0),))), PERFECT)
    assert slow.alternating(4, DRAFTS) == pytest.approx(1e3 * 8 / 90.0)


def test_a_draft_that_is_wrong_costs_its_steps_and_brings_nothing() -> None:
    trace = CeilingTrace(SETTING, HOPELESS)
    assert trace.synchronous(1, DRAFTS) == pytest.approx(1e3 / (3 * 2.0 + SETTING.alone.ms(4)))
    # It says so itself, and is not verified; but its first step has been taken.
    assert trace.synchronous(1, Proposing(3, 0, 0.5)) == pytest.approx(1e3 / 22.0)
    row = trace.row(4)
    assert (row["synchronous"], row["synchronous by"], row["alternating by"]) == ("1.00", "nothing", "nothing")


def test_proposals_bring_what_the_text_and_the_ranks_say() -> None:
    request = TracedRequest(
        prompt=(1, 2, 3, 4, 5, 6, 1, 2),
        answer=(3, 4, 5, 9, 9, 9),
        ranks=(1, 2, 1, 1, 0, 1),
        chances=(0.9, 0.8, 0.9, 0.5, 0.1, 0.9),
    )
    answer = ScriptedAnswer(request)
    assert answer.proposal(0, Proposing(4, least_match=2)) == ScriptedProposal(rows=4, accepted=3)
    assert answer.proposal(0, Proposing(4, least_match=3)) == ScriptedProposal()
    assert answer.proposal(0, Proposing(4, least_chance=0.0)) == ScriptedProposal(rows=4, levels=4, accepted=1)
    assert answer.proposal(2, Proposing(3, least_chance=0.4)) == ScriptedProposal(rows=2, levels=3, accepted=2)
    assert answer.proposal(4, Proposing(4, least_chance=0.0)) == ScriptedProposal(rows=1, levels=1)


def test_the_command_prints_a_table_for_each_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "perfect.jsonl"
    write_trace(file, Trace(SETTING, PERFECT))
    monkeypatch.setattr("sys.argv", ["ceiling", str(file), "--sessions", "1,8"])
    main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| perfect")]
    assert [line.split("|")[2].strip() for line in lines] == ["1", "8"]
    with pytest.raises(InvalidInput, match="sessions"):
        ceiling_rows(file.stem, Trace(SETTING, PERFECT), [0])
