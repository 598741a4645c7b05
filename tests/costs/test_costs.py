"""Measurements that the policy and the draft service's speculation live on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.costs.acceptance import AcceptanceRates
from paceline.costs.running_mean import DECAY, RunningMean
from paceline.costs.step_cost import CERTAIN_AFTER, OUTLIER, PRIOR_ROW_SHARE, StepCost


def test_a_mean_begins_at_its_prior_and_forgets() -> None:
    mean = RunningMean(1.0, 4.0)
    mean.add(6.0)
    assert mean.value == pytest.approx(2.0)
    for _ in range(1000):
        mean.add(6.0)
    assert mean.value == pytest.approx(6.0)
    before = mean.value
    mean.add(before + 1)
    assert mean.value - before == pytest.approx(1 - DECAY)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(1, 100)), max_size=30), st.integers(1, 300))
def test_more_rows_never_look_cheaper(steps: list[tuple[int, float]], rows: int) -> None:
    cost = StepCost()
    for at, ms in steps:
        cost.observe(at, ms)
    assert cost.ms(rows + 1) >= cost.ms(rows) - 1e-9 >= -1e-9


def test_step_costs_follow_straight_lines_between_what_was_seen() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(1, 20.0)
        cost.observe(9, 28.0)
    assert cost.ms(1) == pytest.approx(20.0)
    assert cost.ms(5) == pytest.approx(24.0)
    assert cost.ms(17) == pytest.approx(36.0)


def test_one_stall_does_not_move_a_step_cost_far() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(4, 10.0)
    cost.observe(4, 5000.0)
    assert cost.ms(4) < 11.0


def test_acceptance_rates_learn_each_bin_by_itself() -> None:
    table = AcceptanceRates.of((0.5,), lambda q: 0.5, 2.0)
    for _ in range(200):
        table.add(0.4, False)
        table.add(0.5, True)
    assert table.chance(0.1) < 0.05
    assert table.chance(0.9) > 0.95


def test_a_child_starts_from_its_parent_and_leaves_it_alone() -> None:
    parent = AcceptanceRates.of((), lambda q: 0.5, 2.0)
    for _ in range(100):
        parent.add(0.5, True)
    child = parent.child(8.0)
    known = parent.chance(0.5)
    for _ in range(20):
        child.add(0.5, False)
    assert child.chance(0.5) < 0.5 < known == parent.chance(0.5)


STEPS = st.lists(st.tuples(st.integers(1, 8), st.floats(1, 100)), min_size=1, max_size=60)


@given(STEPS)
def test_one_object_gives_the_line_as_least_squares_do(steps: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for rows, ms in steps:
        cost.observe(rows, ms)
    weights = DECAY ** np.arange(len(steps) - 1, -1, -1.0)
    x, y = np.array(steps).T
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    spread = weights.sum() * (weights * (x - mean_x) ** 2).sum()
    slope = 0.0
    if weights.sum() >= CERTAIN_AFTER and spread >= weights.sum():
        covariance = weights.sum() * (weights * (x - mean_x) * (y - mean_y)).sum()
        slope = min(max(covariance / spread, 0.0), mean_y / mean_x)
    assert cost.per_row == pytest.approx(slope, rel=1e-9, abs=1e-9)
    assert cost.fixed == pytest.approx(mean_y - slope * mean_x, rel=1e-9, abs=1e-9)


@given(STEPS)
def test_and_the_means_of_its_buckets(steps: list[tuple[int, float]]) -> None:
    """Up to 8 rows each number of rows is a bucket; a mean of fewer than 50 steps is the plain one."""
    cost, seen = StepCost(), dict[int, list[float]]()
    for rows, ms in steps:
        cost.observe(rows, ms)
        taken = seen.setdefault(rows, [])
        taken.append(min(ms, OUTLIER * sum(taken) / len(taken)) if taken else ms)
    floor, points = 0.0, dict[int, float]()
    for rows in sorted(seen):
        if len(seen[rows]) < 1 / (1 - DECAY):
            floor = points[rows] = max(floor, sum(seen[rows]) / len(seen[rows]))
    if len(points) == len(seen):
        for rows, expected in points.items():
            assert cost.ms(rows) == pytest.approx(expected, rel=1e-9)
        fewest = min(points)
        share = (1 + PRIOR_ROW_SHARE * -fewest / (1 + PRIOR_ROW_SHARE * fewest)) * points[fewest]
        assert cost.ms(0) == pytest.approx(share, rel=1e-9)
