"""Measurements that the policy lives on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policy.estimates import DECAY, Confidence, Mean, StepCostTable


def test_a_mean_begins_at_its_prior_and_forgets() -> None:
    mean = Mean(1.0, 4.0)
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
    cost = StepCostTable()
    for at, ms in steps:
        cost.add(at, ms)
    assert cost.ms(rows + 1) >= cost.ms(rows) - 1e-9 >= -1e-9


def test_row_costs_follow_straight_lines_between_what_was_seen() -> None:
    cost = StepCostTable()
    for _ in range(50):
        cost.add(1, 20.0)
        cost.add(9, 28.0)
    assert cost.ms(1) == pytest.approx(20.0)
    assert cost.ms(5) == pytest.approx(24.0)
    assert cost.ms(17) == pytest.approx(36.0)


def test_one_stall_does_not_move_a_row_cost_far() -> None:
    cost = StepCostTable()
    for _ in range(50):
        cost.add(4, 10.0)
    cost.add(4, 5000.0)
    assert cost.ms(4) < 11.0


def test_confidence_learns_each_bin_by_itself() -> None:
    table = Confidence.of((0.5,), lambda q: 0.5, 2.0)
    for _ in range(200):
        table.add(0.4, False)
        table.add(0.5, True)
    assert table.chance(0.1) < 0.05
    assert table.chance(0.9) > 0.95


def test_a_child_starts_from_its_parent_and_leaves_it_alone() -> None:
    parent = Confidence.of((), lambda q: 0.5, 2.0)
    for _ in range(100):
        parent.add(0.5, True)
    child = parent.child(8.0)
    known = parent.chance(0.5)
    for _ in range(20):
        child.add(0.5, False)
    assert child.chance(0.5) < 0.5 < known == parent.chance(0.5)
