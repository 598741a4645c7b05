"""Traces are read as they were written, bad ones are refused by line and field, and a replay shows its error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.recorder import FILE, RequestRecorder
from paceline.cli.main import app
from paceline.costs.cost_line import CostLine
from paceline.protocol.draft import Shadow
from paceline.protocol.errors import InvalidInput
from paceline.protocol.records import GenerationStats, RoundRecord, StepTimings
from paceline_lab.simulate.measured import line_of, measured_setting, one_way_ms
from paceline_lab.simulate.policies import Policy
from paceline_lab.simulate.report import measured_speed, replay_trace
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.synthetic import PAIRS, synthetic_requests
from paceline_lab.simulate.trace import (
    Trace,
    TracedRequest,
    TracedRound,
    TracedSetting,
    match_shadow,
    number_anew,
    read_trace,
    write_trace,
)

SETTING = TracedSetting(
    alone=CostLine(((1.0, 20.0), (9.0, 24.0))),
    draft=CostLine(((1.0, 2.0),)),
    draft_beside=CostLine(((1.0, 3.0),)),
    num_draft_tokens=2,
    notes={"a": "b"},
)
REQUEST = TracedRequest(
    prompt=(0, 1, 2, 3, 4, 0, 1),
    answer=(2, 3, 5, 6),
    ranks=(1, 1, 0, 2),
    chances=(0.9, 0.8, 0.1, 0.4),
    arrival_ms=5.0,
    rounds=(TracedRound(30.0, 3, 2, 2, 25.0, 4.0, "model"), TracedRound(55.0, 1, hit=True, self_started=True)),
)

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "PACELINE_HOME": ""})


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = Trace(SETTING, (REQUEST, *synthetic_requests(PAIRS["copies"], 2, 16)))
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        pytest.param(1, {"version": 1}, r"version = 1: must be 2", id="version"),
        pytest.param(1, {"format": "other"}, r"format = 'other': must be paceline-trace", id="format"),
        pytest.param(1, {"alone": []}, r"line 1 of the trace: alone", id="no line"),
        pytest.param(1, {"lease": -1}, r"line 1 of the trace: lease = -1: must be at least 0", id="lease"),
        pytest.param(1, {"unknown": 1}, r"line 1 of the trace: .*unknown", id="unknown field"),
        pytest.param(2, {"chances": [0.5]}, r"line 2 of the trace: chances = 1: must be 4 entries", id="lengths"),
        pytest.param(2, {"ranks": [1, 1, -1, 0]}, r"line 2 of the trace: ranks", id="rank"),
        pytest.param(2, {"prompt": []}, r"line 2 of the trace: prompt = 0: must be at least one token", id="prompt"),
        pytest.param(2, {"answer": [1, 2, -3, 4]}, r"line 2 of the trace: answer = .*ids in \[0, ", id="id"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: int, change: dict[str, object], said: str) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, Trace(SETTING, (REQUEST,)))
    values = [json.loads(text) for text in file.read_text().splitlines()]
    values[line - 1] |= change
    file.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    with pytest.raises(InvalidInput, match=said):
        read_trace(file)


def test_no_trace_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"trace = .*must be a readable UTF-8 file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n{\n")
    with pytest.raises(InvalidInput, match=r"line 2 = .*: must be JSON"):
        read_trace(tmp_path / "bad.jsonl")


def test_a_recorder_keeps_the_shadows_of_the_answer_by_position(tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path, 7, 10)
    recorder.take_shadow(Shadow(1, 10, (1, 0), (0.5, 0.25)))
    recorder.take_shadow(Shadow(1, 14, (3,), (0.125,)))
    recorder.take_lines(alone=SETTING.alone, beside=CostLine())
    recorder.close()
    recorder.close()
    (line,) = (tmp_path / FILE).read_text().splitlines()
    kept = json.loads(line)
    assert (kept["seed"], kept["positions"], kept["ranks"], kept["chances"]) == (
        7,
        [0, 1, 4],
        [1, 0, 3],
        [0.5, 0.25, 0.125],
    )
    assert kept["lines"] == {"alone": [[1.0, 20.0], [9.0, 24.0]]}


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = RequestRecorder(None, 7, 10)
    recorder.take_shadow(Shadow(1, 10, (1,), (0.5,)))
    recorder.close()
    assert [*tmp_path.iterdir()] == []


def test_the_match_before_each_token_and_how_much_of_it_is_right() -> None:
    lengths, right = match_shadow((1, 2, 3, 4, 9, 1, 2), (3, 4, 7))
    assert lengths == (2, 3, 4)
    assert right == (2, 1, 0)


def test_a_trace_says_which_tokens_are_the_same_and_not_which() -> None:
    again = TracedRequest((70, 11), (11, 5), (1, 1), (0.5, 0.5))
    found = number_anew([TracedRequest((900, 11, 900), (7,), (1,), (0.5,)), again])
    assert [(each.prompt, each.answer) for each in found] == [((0, 1, 0), (2,)), ((3, 1), (1, 4))]


def test_a_line_is_the_medians_made_to_rise() -> None:
    steps = [(1, 20.0), (1, 22.0), (1, 90.0), (5, 21.0), (5, 21.0), (5, 21.0), (9, 500.0)]
    assert line_of(steps).points == ((1.0, 22.0), (5.0, 22.0))


def test_a_trip_is_the_median_of_those_with_nobody_before_them() -> None:
    alone = [4.0, 2.0, 90.0]
    assert one_way_ms(alone, 1) == 2.0
    beside_three = [*alone, *(100.0 + wait for wait in range(9))]
    assert one_way_ms(beside_three, 4) == 2.0
    assert one_way_ms((), 4) == 0.0


def test_nothing_is_measured_of_requests_of_one_round() -> None:
    with pytest.raises(InvalidInput, match="rounds = 0: must be two or more in a request"):
        measured_setting([], {}, concurrency=1)


def test_time_in_no_record_is_of_all_verdicts_of_which_a_group_at_rest_sends_few() -> None:
    step = StepTimings(service_ms=20.0, rows=1)
    own = RoundRecord(9, 20.0, 0.0, 0.0, step, 0.0, 0, 0, cache_hit=False, self_started=True)
    sent = replace(own, accept_ms=0.5, self_started=False)
    unrecorded_ms = 1.0
    speed = 1e3 * 10 / (10 * 20.0 + unrecorded_ms)
    stats = GenerationStats(rounds=11, committed=11, tokens_per_second=speed, records=(sent, sent, *(own,) * 9))
    assert measured_setting([stats], {}, concurrency=1).coordinator_ms == pytest.approx((0.5 + unrecorded_ms) / 10)
    stated = {name: [[1.0, ms]] for ms, name in enumerate(("alone", "beside", "draft", "draft_beside"), 2)}
    setting = measured_setting([stats], stated, concurrency=1)
    assert [getattr(setting, name).ms(1) for name in stated] == [2.0, 3.0, 4.0, 5.0]


def test_a_replay_of_a_simulated_run_is_that_run() -> None:
    requests = synthetic_requests(PAIRS["middling"], 1, 128)
    run = simulate(SETTING, requests, Policy(2, 0))
    (totals,) = run.requests
    rounds = (
        TracedRound(totals.first_ms, totals.first_tokens),
        TracedRound(totals.end_ms, totals.tokens - totals.first_tokens),
    )
    measured = TracedRequest(**{name: getattr(requests[0], name) for name in _LISTS}, rounds=rounds)
    replay = replay_trace(Trace(SETTING, (measured,)))
    assert replay is not None
    assert replay.off == pytest.approx(0.0, abs=1e-9)
    assert measured_speed(requests) == 0.0


_LISTS = ("prompt", "answer", "ranks", "chances")


def test_the_command_shows_the_replay_and_every_setting(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, Trace(SETTING, (REQUEST,)))
    ran = runner.invoke(app, ["simulate", "--trace", str(file), "--k", "auto,0,2+ahead", "--sessions", "1,3"])
    assert ran.exit_code == 0, ran.output
    assert "measured tokens/s" in ran.output
    assert ran.output.count("| auto |") == ran.output.count("| 0 |") == ran.output.count("| 2+ahead |") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(["--k", "four"], "k = 'four': must be", id="k"),
        pytest.param(["--target-line", "1-20"], "target_line = '1-20': must be ROWS:MS", id="line"),
        pytest.param(["--draft-line", "own"], "must be 0 or auto, since the trace has no draft", id="no draft"),
        pytest.param(["--sessions", "0"], "sessions = '0': must be whole numbers, at least 1", id="sessions"),
        pytest.param(["--seed", "1"], "seed = 1: must be left out with --trace", id="seed"),
        pytest.param(["--out", "x"], "out = 'x': must be left out with --trace", id="out"),
        pytest.param(["--k", "2", "--fan-out", "3"], "fan_out = 3: must be left out without N+ahead", id="fan-out"),
        pytest.param(
            ["--draft-line", "own", "--k", "0", "--draft-one-way-ms", "5"],
            "draft_one_way_ms = 5.0: must be left out since the trace has no draft",
            id="way to no draft",
        ),
    ],
)
def test_the_command_refuses_by_name(tmp_path: Path, options: list[str], said: str) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, Trace(SETTING, (REQUEST,)))
    ran = runner.invoke(app, ["simulate", "--trace", str(file), *options])
    assert ran.exit_code == 2
    assert said in ran.output
