"""How a generation is shown: colours by provenance, statistics, and the JSON object."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from paceline.cli.display import STYLES, StreamDisplay, coloured_text, comparison, generation_json, histogram_text
from paceline.client import Collector, Generation
from paceline.protocol.generation import Finished, FinishReason, Provenance, Started, Tokens
from paceline.protocol.records import GenerationStats

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
