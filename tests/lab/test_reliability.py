"""`paceline bench reliability`: bins are counted right, and a belief that is wrong shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.policy.acceptance_stats import NgramShadow
from paceline.cli.main import app
from paceline.costs.cost_line import CostLine
from paceline.sampling.match import Match
from paceline_lab.bench.reliability import HALVES, BinTally, Place, Reliability, replay
from paceline_lab.simulate.trace import Trace, TracedRequest, TracedSetting, write_trace


def request(prompt: tuple[int, ...], answer: tuple[int, ...]) -> TracedRequest:
    return TracedRequest(prompt, answer, (0,) * len(answer), (0.0,) * len(answer))


COPY = request((*range(12), 0), tuple(range(1, 11)))
"""Behind its first token the text copies its prompt: matches of 2 to 10 tokens, all of them right."""
TURN = request((*range(12), 0), (1, 2, 3, 20, 21))
"""It turns away behind a match of 4 tokens; then nothing matches."""


def trace(*requests: TracedRequest) -> Trace:
    return Trace(TracedSetting(CostLine(((1.0, 20.0),)), notes={"model": "made"}), requests)


def counts(reliability: Reliability, *titles: str) -> dict[Place, tuple[int, int]]:
    return {place: (tally.positions, tally.right) for place, tally in reliability.tables[titles].items()}


def of_kind(kind: str, *requests: TracedRequest) -> BinTally:
    return replay({kind: trace(*requests)}).tables["kind", "depth from"][kind, 1]


def test_positions_are_counted_by_what_tells_them_apart() -> None:
    counted = replay({"copy": trace(COPY), "turn": trace(TURN)})
    lengths = counts(counted, "length from")
    assert [lengths[2,], lengths[3,], lengths[4,], lengths[5,]] == [(2, 2), (2, 2), (2, 1), (1, 1)]
    assert lengths[9,] == (2, 2), "of 9 and 10 tokens"
    kinds = counts(counted, "kind", "depth from")
    assert [kinds["copy", 1], kinds["turn", 1], kinds["turn", 2]] == [(9, 9), (3, 2), (3, 1)]
    assert counts(counted, "depth from")[1,] == (12, 11)
    assert counts(counted, "score from")["0.2",] == (4, 4), "of 2 and 3 tokens that occurred once"


def test_each_text_counts_once_and_halves_share_none() -> None:
    texts = {"copy": trace(COPY, COPY, TURN, replace(COPY, answer=(5, 6), ranks=(0, 0), chances=(0.0, 0.0)))}
    by_half = {half: counts(replay(texts, half), "depth from")[1,][0] for half in HALVES}
    assert by_half == {"all": 13, "even": 10, "odd": 3}


def test_requests_begin_with_what_those_before_them_taught() -> None:
    fresh, second = NgramShadow(), of_kind("copy", TURN, COPY)
    alone = of_kind("copy", TURN).belief + of_kind("copy", COPY).belief
    assert second.belief > alone, "both copy"
    assert second.prior == pytest.approx(of_kind("copy", TURN).prior + of_kind("copy", COPY).prior)
    prior = sum(fresh.prefix_chances(Match(length, (1,)), 1)[0] for length in range(2, 11))
    assert of_kind("copy", COPY).prior == pytest.approx(prior)


def test_a_belief_that_is_too_bold_is_off_by_what_did_not_come_true(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = trace(*(request((*range(12), 0), (1, 2, 3, 20 + number)) for number in range(60)))
    monkeypatch.setattr(NgramShadow, "prefix_chances", lambda self, match, depth: [1.0] * depth)
    bold = replay({"turn": texts})
    kind, length = bold.tables["kind", "believed from"]["turn", "0.9"], bold.tables["length from",][4,]
    row = kind.row()
    assert [row["positions"], row["believed off by"], row["prior off by"]] == [180, "+0.333", "+0.333"]
    assert kind.verdict() == (True, True, True)
    assert length.row()["believed off by"] == "+1.000"
    assert length.verdict() == (False, False, False), "60 positions say little"


def test_the_command_writes_a_report(tmp_path: Path) -> None:
    files = [tmp_path / "copy.jsonl", tmp_path / "turn.jsonl"]
    for file, text in zip(files, (COPY, TURN), strict=True):
        write_trace(file, trace(text))
    arguments = ["bench", "reliability", *map(str, files), "--out", str(tmp_path), "--half", "even"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (report,) = tmp_path.glob("reliability-*.md")
    assert "- texts: even, of copy, turn" in report.read_text()
    assert "| copy | 1 | 9 | 1.000 |" in report.read_text()


def test_a_trace_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "reliability", str(tmp_path / "gone.jsonl")])
    assert result.exit_code == 2
    assert "gone.jsonl" in result.stderr
