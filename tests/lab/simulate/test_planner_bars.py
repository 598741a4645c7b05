"""The planner's bars, through the simulator: each request beside target-only, all together beside the best constant.

Fresh services at the start of each case: what the planner believes before it has seen anything counts, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.costs.acceptance import FAN_OUT
from paceline.costs.cost_line import CostLine
from paceline_lab.simulate.disturbances import Disturbance, ServiceChange
from paceline_lab.simulate.grid import LEAST_GOODPUT, LEAST_REQUEST, GridCase, Judgement, cases, judge
from paceline_lab.simulate.known_misses import read_misses
from paceline_lab.simulate.policies import PLANNED, TARGET_ONLY, Policy
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.synthetic import PAIRS, SyntheticPair, synthetic_requests
from paceline_lab.simulate.trace import TracedSetting

FEW_CONSTANTS = (TARGET_ONLY, Policy(2, 0), Policy(4, 0))
"""Enough to say what is best within some percent; all of them are tried in the whole matrix."""
QUICK = (GridCase("poor", 1, "dear", "slow", shared=True, fewest=3), GridCase("copies", 1, fewest=3))
LONGER = (
    GridCase("good", 1, "cheap", "slow", shared=True, fewest=3),
    GridCase("hopeless", fewest=3),
    GridCase("middling", 2, fewest=4),
)
RECORD = Path(__file__).with_name("known_misses.json")
KNOWN = read_misses(RECORD)
RENEW = (
    "python -m paceline_lab.simulate.grid --sessions 1,4 --rows dear --drafts quick "
    f"--record {RECORD.relative_to(Path(__file__).parents[3])}"
)
SAMPLE = tuple(case for case in cases((1, 4)) if case.draft == "quick" and case.rows == "dear")
"""What `make test-full` runs: the matrix is a night's work."""


def assert_holds(judged: Judgement) -> None:
    """Both bars, with what was done instead where one is missed."""
    assert judged.worst_request >= LEAST_REQUEST, judged.row()
    assert judged.goodput >= LEAST_GOODPUT, judged.row()


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in LONGER)], ids=lambda case: case.name
)
def test_the_planner_holds_its_bars(case: GridCase) -> None:
    assert_holds(judge(case, PLANNED, FEW_CONSTANTS))


@pytest.mark.full
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_the_planner_holds_its_bars_or_misses_them_by_no_more_than_is_known(case: GridCase) -> None:
    judged, known = judge(case, PLANNED), KNOWN.get(case.name)
    if known is None:
        assert_holds(judged)
        return
    assert judged.miss is not None, f"it holds now, so the record is to be renewed: {RENEW}"
    assert judged.miss.is_no_worse_than(known), judged.row()


LLAMA_ROWS = CostLine(((1.0, 36.0), (2.0, 68.0), (6.0, 163.0), (16.0, 420.0)))
"""Steps of llama.cpp's four bits on two cores (docs/reports/gpu-llama-2026-11-26.md)."""
COPIES = SyntheticPair(0.5, 0.3, copied_share=0.4, copy_length=16, false_matches=0.3)


@pytest.mark.full
def test_a_match_that_fails_costs_no_request_more_than_may_be_lost_where_a_row_costs_a_step() -> None:
    requests = synthetic_requests(COPIES, 16, 96, seed=1)
    setting = TracedSetting(LLAMA_ROWS, target_one_way_ms=0.3, coordinator_ms=0.05, concurrency=1)
    off, planned = (simulate(setting, requests, policy) for policy in (TARGET_ONLY, PLANNED))
    assert sum(each.proposed for each in planned.requests) > 0
    assert planned.least_over(off) >= LEAST_REQUEST


def test_a_draft_of_which_one_step_fits_into_a_targets_pays_though_no_proposal_is_there_in_time() -> None:
    """A round waits for what is being drafted for its outcome: for less than a whole draft."""
    line, draft = CostLine(((1.0, 20.0), (257.0, 32.8))), CostLine(((1.0, 12.0), (257.0, 17.0)))
    setting = TracedSetting(line, draft=draft, draft_one_way_ms=0.3, fan_out=FAN_OUT, lease=16, concurrency=1)
    requests = synthetic_requests(PAIRS["good"], 2, 150, seed=3)
    off, one, planned = (
        simulate(setting, requests, policy).tokens_per_second for policy in (TARGET_ONLY, Policy(1), PLANNED)
    )
    assert one > 1.3 * off and planned > LEAST_GOODPUT * one


def test_known_misses_are_of_the_matrix_and_miss_a_bar() -> None:
    assert set(KNOWN) <= {case.name for case in SAMPLE}
    for miss in KNOWN.values():
        assert miss.worst_request <= LEAST_REQUEST or miss.goodput <= LEAST_GOODPUT, "rounded to three places"


@pytest.mark.full
@pytest.mark.parametrize(
    "disturbance",
    [
        pytest.param(Disturbance(target_lie=0.5), id="target says half"),
        pytest.param(Disturbance((ServiceChange(600.0, "draft", 10.0),)), id="draft ten times slower"),
    ],
)
def test_lies_and_slow_drafts_cost_no_request_more_than_the_account_allows(disturbance: Disturbance) -> None:
    judged = judge(GridCase("middling", 1, "dear", fewest=3), PLANNED, (), disturbance)
    assert judged.worst_request >= LEAST_REQUEST, judged.row()


@pytest.mark.full
@pytest.mark.parametrize(("pair", "least"), [("poor", 0.93), ("good", LEAST_REQUEST)])
def test_a_target_shared_with_another_coordinator_costs_no_request_more_than_may_be_lost(
    pair: str, least: float
) -> None:
    """With the poor draft one coordinator may draft and the other rest: rows of the first lengthen its steps."""
    both = judge(GridCase(pair, 4, "dear"), PLANNED, (), coordinators=2)
    assert both.worst_request >= least, both.row()
