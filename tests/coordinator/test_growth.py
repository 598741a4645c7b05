"""Trees on averages, against hand-made sums."""

from __future__ import annotations

import pytest

from coordinator.growth import MOST_NODES, expected_by_level


def test_a_chain_is_a_running_product() -> None:
    assert expected_by_level([0.5, 0.4, 0.5], [], 1, 3) == pytest.approx((0.5, 0.7, 0.8))


def test_second_children_share_what_the_first_leave() -> None:
    (one,) = expected_by_level([0.6], [0.2, 0.1, 0.1], 3, 1)
    assert one == pytest.approx(0.6 + 0.4 * 0.2 + 0.4 * 0.8 * 0.1)


def test_a_level_takes_the_likeliest_wherever_they_hang() -> None:
    first, second = expected_by_level([0.5, 0.2], [0.4, 0.4], 2, 2)
    assert first == pytest.approx(0.5 + 0.5 * 0.4)
    third_child, best_grandchild = 0.3 * 0.4, 0.5 * 0.2
    assert second == pytest.approx(first + third_child + best_grandchild)


def test_a_child_is_no_likelier_than_a_better_one() -> None:
    (one,) = expected_by_level([0.04], [0.5, 0.5], 3, 1)
    assert one == pytest.approx(3 * 0.04)


def test_what_is_hardly_ever_reached_is_left_out_but_there_is_always_something_to_try() -> None:
    assert expected_by_level([0.0, 0.5], [0.5], 2, 2) == (0.0,)


def test_a_tree_has_no_more_levels_than_it_may() -> None:
    assert len(expected_by_level([0.98] * 16, [0.2] * 5, 6, 16)) == MOST_NODES // 6
    assert len(expected_by_level([0.98] * 16, [0.2] * 5, 2, 3)) == 3
