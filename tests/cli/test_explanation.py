"""Why a request was drafted for so, as people and programs read it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.display import NO_EXPLANATION, account_text, explanation_tables, group_text
from paceline.cli.main import app
from paceline.local.settings import ServeSettings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.explanation import CandidateExplanation, GroupReport, ModeReport, PlanExplanation
from paceline.protocol.records import GenerationStats, RoundRecord, StepTimings

WHY = PlanExplanation(
    target_alone_ms=(100.0, 110.0, 130.0, 170.0),
    draft_ms=20.5,
    target_trip_ms=0.75,
    target_sessions=3,
    positions=64,
    acceptance=(0.8, 0.64),
    ngram_acceptance=(0.31,),
    candidates=(
        CandidateExplanation("none", 0, 1.0, 100.0, 5),
        CandidateExplanation("wait", 4, 3.0, 150.0, 20),
        CandidateExplanation("sideways", 2, 1.5, 0.0),
    ),
    account_ms=-250.0,
    account_bound_ms=60.0,
)
GROUP = GroupReport(
    "matches",
    37.2,
    4,
    promise=1.02,
    promise_bound=1.05,
    modes=(
        ModeReport("rest", "waits", None, 210.4),
        ModeReport("matches", "runs", 1.31),
        ModeReport("drafts", "unpromising"),
    ),
)
NOTHING = StepTimings()
ROUNDS = (
    RoundRecord(9, 900.0, 0.0, 0.0, NOTHING, 0.0, 0, 0, False),
    RoundRecord(10, 200.0, 0.0, 0.0, NOTHING, 0.0, 4, 3, False, "model"),
    RoundRecord(14, 100.0, 0.0, 0.0, NOTHING, 0.0, 4, 1, False, "model"),
    RoundRecord(16, 80.0, 0.0, 0.0, NOTHING, 0.0, 0, 0, False),
)


def shown(stats: GenerationStats) -> list[list[str]]:
    """What is printed, line by line in cells."""
    written = io.StringIO()
    Console(file=written, width=160).print(*explanation_tables(stats), sep="\n")
    return [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in written.getvalue().splitlines()]


def test_tables_say_what_was_known_compared_and_done() -> None:
    lines = shown(GenerationStats(records=ROUNDS, explanation=WHY))
    assert ["target, no draft at work", "100.00", "110.00", "130.00", "170.00"] in lines
    assert ["target, a draft at work", "?", "?", "?", "?"] in lines
    assert ["draft", "20.50", "?", "?", "?"] in lines
    assert ["draft, 64 positions", "0.80", "0.64"] in lines
    assert ["n-gram", "0.31", "-"] in lines
    assert ["target-only", "0", "1.00", "100.00", "10.0", "5"] in lines
    assert ["drafted just in time", "4", "3.00", "150.00", "20.0", "20"] in lines
    assert ["sideways", "2", "1.50", "?", "?", "-"] in lines, "a way that only newer coordinators know"
    assert ["model", "4", "3.00", "150.00", "20.0", "2"] in lines
    assert ["target-only", "0", "1.00", "80.00", "12.5", "1"] in lines, "without the round that waited for the prompt"
    assert any("sessions that share the target: 3" in line[0] for line in lines)


def test_the_account_says_who_is_ahead_and_when_it_is_overdrawn() -> None:
    assert "250.0 ms less than target-only" in account_text(WHY).plain
    assert "runs target-only" not in account_text(WHY).plain
    overdrawn = account_text(replace(WHY, account_ms=61.0)).plain
    assert "61.0 ms more than target-only" in overdrawn and "runs target-only" in overdrawn


def test_the_group_says_what_it_does_and_why_not_something_else() -> None:
    lines = group_text(GROUP).plain.splitlines()
    assert lines == [
        "group: 4 sessions share the target, and copy matches for the time of 37 steps at rest",
        "  rest: looked at in 210 steps",
        "  matches: in force; 1.31 tokens for each of resting",
        "  drafts: the closed form promises 1.02 times what matches bring, and a trial takes more than 1.05",
    ]
    explained = replace(WHY, group=GROUP)
    assert lines[0] in [cells[0] for cells in shown(GenerationStats(explanation=explained))]


def test_a_coordinator_that_does_not_explain_is_said_to_and_its_rounds_are_shown() -> None:
    lines = shown(GenerationStats(records=ROUNDS))
    assert lines[0] == [NO_EXPLANATION]
    assert ["model", "4", "3.00", "150.00", "20.0", "2"] in lines


def test_the_command_asks_a_running_coordinator(tmp_path: Path) -> None:
    settings = ServeSettings(model="table:vocab=300,seed=1", drafter="ngram", port=0, draft_port=0, target_port=0)
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
    with SupervisedServices(settings, tmp_path) as services:
        result = runner.invoke(app, ["explain", "Hello", "--url", services.address, "--max-new-tokens", "12"])
    assert result.exit_code == 0, result.output
    assert "what the rounds did" in result.stdout
    assert "12 tokens in" in result.stdout
