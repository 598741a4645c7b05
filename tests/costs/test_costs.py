"""Means and rates that the planner lives on."""

from __future__ import annotations

import pytest

from paceline.costs.acceptance import AcceptanceRates
from paceline.costs.running_mean import DECAY, RunningMean


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
