"""How a generation is shown: colours by provenance, statistics, the JSON object, and why it was drafted for so."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.display import (
    NO_EXPLANATION,
    STYLES,
    StreamDisplay,
    account_text,
    coloured_text,
    comparison,
    explanation_tables,
    generation_json,
    group_text,
    histogram_text,
)
from paceline.cli.main import app
from paceline.client import Collector, Generation
from paceline.local.settings import ServeSettings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.explanation import CandidateExplanation, GroupReport, ModeReport, PlanExplanation
from paceline.protocol.generation import Finished, FinishReason, Provenance, Started, Tokens
from paceline.protocol.records import GenerationStats, RoundRecord, StepTimings

STATS = GenerationStats(
    rounds=4,
    committed=9,
    cache_hits=1,
    cache_misses=3,
    time_to_first_token_ms=12.5,
    tokens_per_second=50.0,
    verify_ms_p50=10.0,
    draft_wait_ms_p50=1.0,
    num_spec_steps=3,
    num_draft_tokens=9,
    num_accepted_draft_tokens=5,
    acceptance_histogram=(1, 0, 1, 1),
    num_spec_tokens=3,
)
MIXED = Tokens(
    (5, 6, 7), "one two three", (Provenance.ACCEPTED, Provenance.ACCEPTED, Provenance.BONUS), (), (3, 7, 13)
)
MARKUP = "[red]array[0][/red] :smile:"
"""Text that looks so."""
EVENTS = (
    Started(3, (1, 2), "m"),
    MIXED,
    Tokens((8,), MARKUP, (Provenance.TARGET,), (), (len(MARKUP),)),
    Finished(FinishReason.STOP, "!", STATS),
)
TEXT = f"one two three{MARKUP}!"


def generation(token_ids: tuple[int, ...] = (5, 6, 7), speed: float = 50.0) -> Generation:
    stats = GenerationStats(tokens_per_second=speed)
    return Generation("t", token_ids, (1,), FinishReason.LENGTH, 3, (Provenance.TARGET,) * len(token_ids), stats)


def test_each_tokens_text_has_its_provenances_colour() -> None:
    text = coloured_text(MIXED)
    assert text.plain == MIXED.text
    spans = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    accepted, bonus = STYLES[Provenance.ACCEPTED], STYLES[Provenance.BONUS]
    assert spans == [("one", accepted), (" two", accepted), (" three", bonus)]


def test_text_held_back_belongs_to_the_token_that_made_it_certain() -> None:
    provenance = (Provenance.ACCEPTED, Provenance.RECOVERED)
    text = coloured_text(Tokens((1, 2), "é", provenance, (), (0, 1)))
    assert [(span.start, span.end) for span in text.spans if span.start < span.end] == [(0, 1)]
    assert text.spans[-1].style == STYLES[Provenance.RECOVERED]


def test_a_stream_is_never_wrapped_or_marked_up() -> None:
    written = io.StringIO()
    screen = StreamDisplay(Console(file=written, width=10))
    for event in EVENTS:
        screen.show(event)
    assert written.getvalue() == f"{TEXT}\n"


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ((), "-"),
        ((0, 0), "-"),
        ((1, 0, 1, 1), "0: 1, 2: 1, 3: 1"),
        ((2, *[0] * 30, 3), "0: 2, 31: 3"),
        (tuple(range(1, 21)), "0: 1, 1: 2, 2-3: 7, 4-7: 26, 8-15: 100, 16-19: 74"),
    ],
)
def test_a_histogram_says_what_happened_in_a_line(counts: tuple[int, ...], shown: str) -> None:
    assert histogram_text(counts) == shown


def test_json_has_exactly_the_promised_fields() -> None:
    collector = Collector()
    for event in EVENTS:
        collector.add(event)
    shown = generation_json(collector.generation())
    assert shown == {
        "text": TEXT,
        "token_ids": [5, 6, 7, 8],
        "prompt_token_ids": [1, 2],
        "finish_reason": "stop",
        "seed": 3,
        "sample_index": 0,
        "provenance": ["accepted", "accepted", "bonus", "target"],
        "stats": {
            "rounds": 4,
            "committed": 9,
            "cache_hits": 1,
            "cache_misses": 3,
            "time_to_first_token_ms": 12.5,
            "tokens_per_second": 50.0,
            "verify_ms_p50": 10.0,
            "draft_wait_ms_p50": 1.0,
            "prediction_accepted": 0,
            "prediction_rejected": 0,
            "speculative_decoding": {
                "mean_acceptance_length": pytest.approx(1 + 5 / 3),
                "draft_acceptance_rate": pytest.approx(5 / 9),
                "acceptance_histogram": [1, 0, 1, 1],
                "num_spec_steps": 3,
                "num_accepted_draft_tokens": 5,
                "num_draft_tokens": 9,
                "num_spec_tokens": 3,
            },
        },
    }


@pytest.mark.parametrize(("token_ids", "words"), [((5, 6, 7), "the same tokens"), ((5, 6, 8), "other tokens")])
def test_comparison_shows_both_speeds_also_when_target_only_is_faster(token_ids: tuple[int, ...], words: str) -> None:
    text = comparison(generation(speed=20.0), generation(token_ids, speed=40.0)).plain
    assert "20.0 tokens per second (0.50 times)" in text
    assert "40.0 tokens per second" in text
    assert words in text


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
    assert "no draft is used" not in account_text(WHY).plain
    overdrawn = account_text(replace(WHY, account_ms=61.0)).plain
    assert "61.0 ms more than target-only" in overdrawn and "no draft is used" in overdrawn


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
