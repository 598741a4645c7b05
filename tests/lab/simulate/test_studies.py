"""Studies beside arithmetic, and what a validation says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.protocol.errors import InvalidInput
from paceline_lab.bench.validation import Deviation, ValidationCell, validation_text
from paceline_lab.simulate.studies import STUDIES, run_studies
from paceline_lab.simulate.studies.parts import MIDDLE, run


def test_a_named_model_drafts_faster_than_it_decodes_alone() -> None:
    one = {"sessions": 2, "answer_tokens": {"median": 60}, "prompt_tokens": {"median": 8}}
    plain = run(MIDDLE.targets(1), one, k="0", seconds=1.0, warmup_seconds=0.5)
    drafted = run(MIDDLE.targets(1), one, drafts=MIDDLE.drafts(1), k="4+ahead", seconds=1.0, warmup_seconds=0.5)
    assert drafted.tokens_per_second > 1.3 * plain.tokens_per_second


def test_an_unknown_study_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="study = 'speed': must be all or one of drafts, zones"):
        run_studies("speed", None, 0)
    assert set(STUDIES) == {"drafts", "zones", "changes"}


def test_a_validation_counts_what_is_within_the_bar_or_the_noise() -> None:
    near, far = (Deviation(ValidationCell("table", 4, "4"), 100.0, speed, 0.0, "1.0") for speed in (104.0, 94.0))
    text = validation_text([near, far])
    assert "Near: 1 of 2." in text
    assert "+4.0%" in text
    assert "-6.0%" in text
    assert replace(far, noise=0.07).is_near
