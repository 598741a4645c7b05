"""A plan tells reasoning and answers apart, where there is reasoning."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.costs.cost_line import CostLine
from paceline_lab.plan.reasoning import reasoning_parts
from paceline_lab.predict.cycle import StepTimes
from paceline_lab.predict.positions import TargetPositions, TextPositions
from paceline_lab.predict.rounds import ProposalShape
from paceline_training.corpus import Role
from tests.lab.predict.made_positions import made_positions

SHAPES = (ProposalShape(1), ProposalShape(4))
TIMES = StepTimes(
    CostLine(((1, 10.0), (64, 10.0))), {"draft": CostLine(((1, 1.0),))}, target_trip_ms=0.0, draft_trip_ms=0.0
)


def text(roles: list[Role], accepted: list[float]) -> TextPositions:
    count = len(roles)
    ids, figures = np.zeros(count, np.int32), np.zeros(count)
    target = TargetPositions(ids, np.array(roles, np.int8), ids, ids, ids, figures, figures, figures, figures)
    return TextPositions(0.0, True, np.zeros(count + 1, np.int32), target, {"draft": made_positions(accepted)})


def test_each_part_has_rounds_of_its_own() -> None:
    first = text([Role.THINKING] * 6 + [Role.ANSWER] * 12, [1.0] * 6 + [0.0] * 12)
    other = text([Role.ANSWER] * 2 + [Role.THINKING] * 14, [0.5] * 2 + [1.0] * 14)
    (part,) = reasoning_parts([first, other], SHAPES, TIMES)
    thinking, answer = part.tables[0]
    assert (thinking["part"], thinking["positions"], thinking["first"]) == ("reasoning", 20, 1.0)
    assert thinking["tokens a round"] == pytest.approx(20 / (2 + 3)), "6 sure tokens take two rounds, 14 take three"
    assert (answer["part"], answer["positions"]) == ("answer", 14)
    assert answer["first"] == pytest.approx(1 / 14)
    assert (thinking["fastest"], answer["fastest"]) == ("k=4", "k=1"), "sure tokens bear longer proposals"
    assert thinking["gain"] == pytest.approx(4 * 10 / (10 + 4 * 1)), "20 tokens in 5 rounds of 14 ms"
    assert isinstance(answer["gain"], float) and answer["gain"] < 1, "one token in 14 is worth no draft step of 1 ms"
    assert answer["tokens a round"] == pytest.approx(14 / (12 + 1.5)), "two tokens of .5 take one round or two"


def test_without_reasoning_nothing_is_told() -> None:
    assert not [*reasoning_parts([text([Role.ANSWER] * 8, [0.5] * 8)], SHAPES, TIMES)]
