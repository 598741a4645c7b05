"""What an explanation may hold, and that only requests that ask for one carry it."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.stats import StatsBuilder
from paceline.protocol import codec
from paceline.protocol.errors import InvalidInput
from paceline.protocol.explanation import CandidateExplanation, GroupReport, ModeReport, PlanExplanation
from paceline.protocol.generation import Finished, FinishReason
from paceline.v1 import generation_service_pb2 as pb


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_alone_ms", (1.0, 2.0)),
        ("target_beside_ms", (1.0,) * 5),
        ("acceptance", (0.5,) * 65),
        ("ngram_acceptance", (0.5,) * 65),
        ("candidates", (CandidateExplanation("none"),) * 65),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_lists_that_are_too_long_or_odd_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"{field} = {len(value)}"):
        PlanExplanation(**{field: value})


def test_a_group_of_too_many_modes_is_named() -> None:
    with pytest.raises(InvalidInput, match="modes = 17"):
        GroupReport("rest", modes=(ModeReport("rest", "runs"),) * 17)


def test_statistics_carry_what_they_were_given_and_nothing_else() -> None:
    group = GroupReport("rest", 3.0, 4, modes=(ModeReport("rest", "runs"), ModeReport("matches", "paused", 0.5, 9.0)))
    why = PlanExplanation(draft_ms=2.0, candidates=(CandidateExplanation("none", rounds=3),), group=group)
    for given in (why, None):
        finished = Finished(FinishReason.LENGTH, "", StatsBuilder(0.0).build(given))
        message = codec.encode_generate_event(finished)
        assert message.finished.stats.HasField("explanation") == (given is not None)
        assert codec.decode_generate_event(pb.GenerateResponse.FromString(message.SerializeToString())) == finished
