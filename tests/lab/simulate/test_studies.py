"""Studies beside arithmetic, and what a validation says of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.protocol.errors import InvalidInput
from paceline_lab.bench.validation import Deviation, ValidationCell, validation_text
from paceline_lab.simulate.studies import STUDIES, capacity, run_studies
from paceline_lab.simulate.studies.capacity import GAMMA, CapacityGain, TimedPair
from paceline_lab.simulate.studies.parts import MIDDLE, run


def test_the_claimed_gain_is_of_the_steps_own_times() -> None:
    assert TimedPair("x", batches=False).claimed(64) == pytest.approx(1 + 4 * 2.02 / 20.25)
    assert TimedPair("x", row_ms=0.5).claimed(8) == pytest.approx(1 + 4 * 2.16 / 40.0)


def test_without_batching_as_many_more_clients_are_served_as_the_formula_says() -> None:
    """Saturated, one proposal a step: E ÷ (t_v + γ·t_d) against E ÷ t_v for all clients together."""
    pair = TimedPair("x", batches=False)
    speeds = {each: _speed(pair, 12, elsewhere=each) for each in (False, True)}
    assert speeds[True] / speeds[False] == pytest.approx(pair.claimed(12), rel=0.06)


def _speed(pair: TimedPair, clients: int, *, elsewhere: bool) -> float:
    traffic: dict[str, Any] = {
        "sessions": clients,
        "prompt_tokens": {"median": 8},
        "answer_tokens": {"median": 128},
        "acceptance": 0.8,
    }
    target = {**pair.target(drafts_itself=not elsewhere), "link": {"ms": 0}}
    draft = {**pair.draft(elsewhere=elsewhere), "link": {"ms": 0}}
    found = run(
        target, traffic, drafts=draft, k=str(GAMMA), seconds=4.0, warmup_seconds=1.0, coordinators={"round_ms": 0}
    )
    return found.tokens_per_second


def test_a_gain_is_of_the_same_number_of_clients() -> None:
    itself = [100.0 / each for each in capacity.CLIENTS]
    found = CapacityGain(TimedPair("x"), itself, [150.0 / each for each in capacity.CLIENTS], itself)
    assert found.gain(8, found.elsewhere) == pytest.approx(1.5)
    assert [row["gain ahead"] for row in found.rows()] == [1.0] * len(capacity.CLIENTS)


def test_a_named_model_drafts_faster_than_it_decodes_alone() -> None:
    one = {"sessions": 2, "answer_tokens": {"median": 60}, "prompt_tokens": {"median": 8}}
    plain = run(MIDDLE.targets(1), one, k="0", seconds=1.5, warmup_seconds=1.0)
    drafted = run(MIDDLE.targets(1), one, drafts=MIDDLE.drafts(1), k="4+ahead", seconds=1.5, warmup_seconds=1.0)
    assert drafted.tokens_per_second > 1.3 * plain.tokens_per_second


def test_an_unknown_study_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="study = 'speed': must be all or one of drafts, zones"):
        run_studies("speed", None, 0)
    assert set(STUDIES) == {"drafts", "zones", "capacity", "breaking", "cost", "changes"}


def test_a_validation_counts_what_is_within_the_bar_or_the_noise() -> None:
    near, far = (Deviation(ValidationCell("table", 4, "4"), 100.0, speed, 0.0, "1.0") for speed in (104.0, 94.0))
    text = validation_text([near, far])
    assert "Near: 1 of 2." in text
    assert "+4.0%" in text
    assert "-6.0%" in text
    assert replace(far, noise=0.07).is_near
