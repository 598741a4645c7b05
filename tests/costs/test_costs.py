"""Means and rates that the planner lives on."""

from __future__ import annotations

import pytest

from paceline.costs.acceptance import TokenAcceptance, bin_of, binned_chances
from paceline.costs.running_mean import MEMORY, RunningMean


def test_a_mean_begins_at_its_prior_and_forgets() -> None:
    mean = RunningMean(1.0, 4.0)
    mean.add(6.0)
    assert mean.value == pytest.approx(2.0)
    for _ in range(1000):
        mean.add(6.0)
    assert mean.value == pytest.approx(6.0)
    before = mean.value
    mean.add(before + 1)
    assert mean.value - before == pytest.approx(1 / MEMORY)


def test_binned_chances_learn_each_bin_by_itself() -> None:
    table = binned_chances(lambda q: 0.5)
    for _ in range(200):
        table[bin_of(0.49)].add(0.0)
        table[bin_of(0.5)].add(1.0)
    assert table[bin_of(0.41)].value < 0.05
    assert table[bin_of(0.59)].value > 0.95
    assert table[bin_of(1.0)].value == 0.5, "the last bin holds it"


def test_a_child_starts_from_its_parent_and_leaves_it_alone() -> None:
    parent = RunningMean(0.5)
    for _ in range(100):
        parent.add(1.0)
    child = parent.child()
    known = parent.value
    for _ in range(20):
        child.add(0.0)
    assert child.value < 0.5 < known == parent.value


def test_a_table_learns_and_starts_sane() -> None:
    fresh = TokenAcceptance()
    assert fresh.chance(0.99, 1) > fresh.chance(0.3, 1) > fresh.chance(0.3, 2) > fresh.chance(0.3, 3) > 0
    assert sum(fresh.chance(0.3, rank) for rank in range(1, 30)) < 1
    for i in range(1000):
        fresh.take_rank((2, 2, 1, 0)[i % 4], 0.95)
    assert fresh.chance(0.95, 2) == pytest.approx(0.5, abs=0.02)
    assert fresh.chance(0.95, 1) == pytest.approx(0.25, abs=0.02)
    assert fresh.chance(0.3, 1) == TokenAcceptance().chance(0.3, 1)
    assert fresh.reach(1)[0] == pytest.approx(0.25, abs=0.02)
    for _ in range(2000):
        fresh.take_rank(1, 0.95)
    assert fresh.chance(0.95, 1) > 0.95


def test_ranks_say_what_every_length_would_have_brought() -> None:
    table = TokenAcceptance()
    for position in range(2000):
        table.take_rank(0 if position % 4 == 3 else 1, 0.8, position % 4)
    depths = [mean.value for mean in table.by_depth[:4]]
    assert depths[0] == pytest.approx(3 / 4, abs=0.05)
    assert depths[1] == pytest.approx(2 / 3, abs=0.05)
    assert depths[2] == pytest.approx(1 / 2, abs=0.05)
    assert depths[3] == pytest.approx(0, abs=0.05)
