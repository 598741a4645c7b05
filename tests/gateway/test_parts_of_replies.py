"""`metrics` of a reply has reasoning and answer apart where there was reasoning."""

from __future__ import annotations

import pytest

from paceline.protocol.generation import Finished, FinishReason
from paceline.protocol.records import GenerationStats, RoundStats
from paceline_gateway.openai.choices import ChoiceEvent
from paceline_gateway.openai.usage import Tally


def metrics_of(stats: GenerationStats) -> dict[str, object]:
    tally = Tally(1)
    tally.add(ChoiceEvent(0, Finished(FinishReason.STOP, "", stats)))
    assert tally.metrics is not None
    return tally.metrics


def test_reasoning_and_answer_are_told_apart() -> None:
    reasoning = RoundStats(3, 9, 40.0, num_spec_steps=2, num_draft_tokens=8, num_accepted_draft_tokens=6)
    found = metrics_of(GenerationStats(5, 11, reasoning=reasoning, answer=RoundStats(2, 2, 10.0)))
    assert found["reasoning"] == {
        "mean_acceptance_length": pytest.approx(4.0),
        "draft_acceptance_rate": pytest.approx(0.75),
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 8,
        "rounds": 3,
        "tokens": 9,
        "tokens_per_second": 40.0,
    }
    assert isinstance(found["answer"], dict)
    assert found["answer"]["tokens"] == 2


def test_without_reasoning_metrics_are_as_vllm_has_them() -> None:
    assert [*metrics_of(GenerationStats(5, 11))] == ["speculative_decoding"]
