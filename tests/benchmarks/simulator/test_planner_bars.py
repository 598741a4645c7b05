"""The planner's bars, through the simulator: each request beside target-only, all together beside the best constant.

Fresh services at the start of each case: what the planner believes before it has seen anything counts, too.
"""

from __future__ import annotations

import pytest

from benchmarks.simulator.grid import LEAST_GOODPUT, LEAST_REQUEST, GridCase, Judgement, cases, judge
from benchmarks.simulator.planned import PlannedPolicy
from benchmarks.simulator.policies import ConstantPolicy
from benchmarks.simulator.run import TARGET_ONLY_POLICY
from benchmarks.simulator.services import Disturbance, ServiceChange

FEW_CONSTANTS = (TARGET_ONLY_POLICY, ConstantPolicy(2), ConstantPolicy(4), ConstantPolicy(4, 4))
"""Enough to say what is best within some percent; all of them are tried in the whole matrix."""

QUICK = (
    GridCase("hopeless"),
    GridCase("hopeless", 8, "dear", shared=True),
    GridCase("poor", 1, "dear", "slow", shared=True),
    GridCase("middling", 1, "dear"),
    GridCase("middling", 8),
    GridCase("good", 1, "cheap", "slow", shared=True),
    GridCase("good", 4, "dear"),
    GridCase("perfect", 1, "dear"),
    GridCase("mixed", 4, "dear"),
    GridCase("copies", 1),
)
BEHIND_A_MISS = "all wait for the draft behind a miss: that pays on real services, and costs a percent here"
MISSED = [
    pytest.param(case, marks=pytest.mark.xfail(strict=True, reason=reason))
    for case, reason in (
        (GridCase("copies", 16, "dear"), "those whose text repeats take their rows from the others"),
        (GridCase("good", 8, "dear"), BEHIND_A_MISS),
    )
]
ALL = tuple(cases((1, 4, 16, 64, 256)))


def assert_holds(judged: Judgement) -> None:
    """Both bars, with what was done instead where one is missed."""
    assert judged.worst_request >= LEAST_REQUEST, judged.row()
    assert judged.goodput >= LEAST_GOODPUT, judged.row()


@pytest.mark.parametrize("case", [*QUICK, *MISSED], ids=lambda case: case.name)
def test_the_planner_holds_its_bars(case: GridCase) -> None:
    assert_holds(judge(case, PlannedPolicy(), FEW_CONSTANTS))


@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_the_planner_holds_its_bars_everywhere(case: GridCase) -> None:
    assert_holds(judge(case, PlannedPolicy()))


@pytest.mark.parametrize(
    "disturbance",
    [
        pytest.param(Disturbance(target_lie=2.0), id="target says twice"),
        pytest.param(Disturbance(target_lie=0.5), id="target says half"),
        pytest.param(Disturbance(draft_lie=0.5), id="draft says half"),
        pytest.param(Disturbance((ServiceChange(600.0, "draft", 10.0),)), id="draft ten times slower"),
    ],
)
def test_lies_and_slow_drafts_cost_no_request_more_than_the_account_allows(disturbance: Disturbance) -> None:
    judged = judge(GridCase("middling", 1, "dear"), PlannedPolicy(), (), disturbance)
    assert judged.worst_request >= LEAST_REQUEST, judged.row()


def test_a_target_shared_with_another_coordinator_costs_no_request_more_than_the_account_allows() -> None:
    case = GridCase("poor", 4, "dear")
    both = judge(case, PlannedPolicy(), ())
    assert both.worst_request >= LEAST_REQUEST, both.row()
