"""Rounds on a time axis: lengths are the records' own, and a viewer can show them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.trace import MOST_ROUNDS, gantt
from paceline.protocol.errors import InvalidInput
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.timeline import layout
from paceline.timeline.layout import PlacedRound, Track, chrome_trace, place_rounds
from paceline.timeline.saved import read_rounds, rounds_json
from tests.timeline.trace_rules import broken_rules

TARGET = StepTimings(queue_ms=1, forward_ms=8, sample_ms=1, service_ms=10, rows=4, sessions=1)
DRAFT = StepTimings(queue_ms=0, forward_ms=3, sample_ms=0.5, service_ms=3.5, rows=3, sessions=1)
WAITED = RoundRecord(7, 18, 5, 2, TARGET, 1, 3, 2, False, "model", DRAFT, begun_ms=4)
HIT = RoundRecord(10, 13, 0, 2, TARGET, 1, 3, 3, True, "model", DRAFT, begun_ms=22.5)
STARTED_ITSELF = RoundRecord(14, 9, 0, 0, TARGET, 0.5, 0, 0, False, self_started=True, begun_ms=35.5)
REQUEST = [WAITED, HIT, STARTED_ITSELF]


def slices(placed: PlacedRound, track: Track) -> list[tuple[str, float, float]]:
    return [(each.name, each.start_ms, each.end_ms) for each in placed.slices if each.track is track]


def random_records(seed: int) -> list[RoundRecord]:
    """Rounds as a coordinator records them, with what clocks that are never compared do to them."""
    draw = random.Random(seed)
    found, clock = [], draw.uniform(0, 50)
    for place in range(40):
        parts = [draw.choice((0.0, draw.uniform(0, 20))) for _ in range(3)]
        queue, forward, sample = parts
        target = StepTimings(queue, forward, sample, sum(parts) * draw.uniform(0.9, 1.1), 3, 2)
        wait, wire, accept = (draw.choice((0.0, draw.uniform(0, 5))) for _ in range(3))
        itself = draw.random() < 0.4
        if itself:
            wait, wire = 0.0, draw.choice((0.0, 0.3))
        whole = (wait + wire + target.service_ms + accept) * (draw.uniform(0.7, 1) if itself else 1)
        drafted = replace(DRAFT, service_ms=draw.uniform(0, 30)) if draw.random() < 0.5 else StepTimings()
        hit = draw.random() < 0.5
        record = RoundRecord(place, whole, wait, wire, target, accept, 3, 1, hit, "model", drafted)
        found.append(replace(record, self_started=itself, begun_ms=float(f"{clock:.6g}")))
        clock += whole + draw.choice((0.0, draw.uniform(0, 3)))
    return found


def test_parts_follow_each_other_and_are_as_long_as_the_record_says() -> None:
    waited = next(place_rounds(REQUEST))
    assert sorted(slices(waited, Track.COORDINATOR), key=lambda each: (each[1], -each[2])) == [
        *(("round", 4, 22), ("draft wait", 4, 9), ("verify", 9, 21)),
        *(("wire", 9, 10), ("wire", 20, 21), ("accept", 21, 22)),
    ]
    parts = [("verify", 10, 20), ("queue", 10, 11), ("forward", 11, 19), ("sample", 19, 20)]
    assert slices(waited, Track.TARGET) == parts
    assert slices(waited, Track.DRAFT)[0] == ("draft", 4.75, 8.25), "in the middle of the wait for it"


def test_a_hit_was_drafted_before_its_round_began() -> None:
    hit = list(place_rounds(REQUEST))[1]
    assert slices(hit, Track.DRAFT)[0] == ("draft (hit)", 19, 22.5)
    assert [flow.name for flow in hit.flows] == ["verdict", "round", "hit"]


def test_the_target_starts_a_round_itself_where_it_ended_the_last() -> None:
    own = list(place_rounds(REQUEST))[2]
    (name, begun, end), *_ = slices(own, Track.TARGET)
    assert (name, begun) == ("verify", 33.5), "it is cut there: its clock may say that it took longer"
    assert end == 43, "the verdict was on its way as long as the last one"
    assert [flow.name for flow in own.flows] == ["verdict"], "nobody sent it"


def test_rounds_of_an_older_coordinator_follow_closely() -> None:
    placed = list(place_rounds([replace(record, begun_ms=0) for record in REQUEST]))
    assert [(each.whole.start_ms, each.whole.end_ms) for each in placed] == [(0, 18), (18, 31), (31, 40)]


def test_a_viewer_can_show_every_trace() -> None:
    for seed in range(20):
        trace: Any = chrome_trace(random_records(seed))
        assert list(broken_rules(trace)) == [], seed
        assert sum(event["name"] == "round" and event["ph"] == "X" for event in trace["traceEvents"]) == 40


def test_the_rules_notice_what_a_viewer_could_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the cuts, services would do two things at once, which the rules see."""
    place = layout._place
    monkeypatch.setattr(layout, "_place", lambda record, _: place(record, layout._Ends()))
    assert any("ends after" in broken for broken in broken_rules(chrome_trace(random_records(1))))
    trace: dict[str, Any] = chrome_trace(REQUEST)
    events = trace["traceEvents"]
    assert any("no pair" in broken for broken in broken_rules(trace | {"traceEvents": events[:-1]}))
    assert any("before the one" in broken for broken in broken_rules(trace | {"traceEvents": events[::-1]}))


BODY = {"object": "chat.completion", "paceline": {"seed": 3, "rounds": rounds_json(REQUEST)}}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(BODY, indent=1),
        f"{json.dumps({'text': 'x'})}\n{json.dumps(BODY)}\n",
        f'data: {{"paceline": {{"token_ids": [3]}}}}\n\ndata: {json.dumps(BODY)}\n\ndata: [DONE]\n\n',
    ],
    ids=["a body", "lines", "a stream"],
)
def test_a_saved_response_gives_its_rounds_back(text: str, tmp_path: Path) -> None:
    (tmp_path / "saved").write_text(text)
    assert read_rounds(tmp_path / "saved") == REQUEST


def _changed(**fields: object) -> str:
    record = rounds_json([WAITED])[0] | fields
    return json.dumps({"paceline": {"rounds": [{name: value for name, value in record.items() if value != ...}]}})


def test_fields_that_are_unknown_or_absent_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text(_changed(later_version=1).replace('"begun_ms": 4', '"other": 4'))
    assert read_rounds(tmp_path / "saved") == [replace(WAITED, begun_ms=0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no JSON", "request = "),
        ('{"paceline": {"rounds": []}}', '"rounds": true'),
        ('{"paceline": {"rounds": [3]}}', "rounds[0] = 3: must be an object"),
        ('{"paceline": {"rounds": [{}]}}', "rounds[0].base_length = None: must be given"),
        (_changed(round_ms=-1), "rounds[0].round_ms = -1: must be a number in [0, 18446744073709551615]"),
        (_changed(round_ms=float("nan")), "rounds[0].round_ms = nan"),
        (_changed(accepted=1.5), "rounds[0].accepted = 1.5: must be a whole number"),
        (_changed(cache_hit=1), "rounds[0].cache_hit = 1: must be a bool"),
        (_changed(target={"queue_ms": "x"}), "rounds[0].target.queue_ms = 'x'"),
    ],
)
def test_what_has_no_rounds_is_refused_by_its_field(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "saved").write_text(text)
    with pytest.raises(InvalidInput, match=re.escape(said)):
        read_rounds(tmp_path / "saved")


def test_a_terminal_shows_the_first_of_many_rounds_and_says_so() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(gantt([replace(HIT, begun_ms=0)] * 1000, 100))
    assert len(capture.get().splitlines()) < MOST_ROUNDS + 6
    assert f"… and {1000 - MOST_ROUNDS} more rounds" in capture.get()
