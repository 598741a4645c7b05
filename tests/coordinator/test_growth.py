"""Trees on averages, against hand-made sums."""

from __future__ import annotations

import pytest

from coordinator.policy.growth import MOST_LAST, expected_of_trees


def test_a_chain_is_a_running_product() -> None:
    chains = expected_of_trees([0.5, 0.4, 0.5], [])
    assert [sum(of_one_node) for of_one_node in chains] == pytest.approx([0.5, 0.7, 0.8])
    assert {len(sums) for sums in chains} == {1}


def test_second_children_share_what_the_first_leave() -> None:
    (sums,) = expected_of_trees([0.6], [0.2, 0.1])
    assert sums == pytest.approx((0.6, 0.6 + 0.4 * 0.2, 0.6 + 0.4 * 0.2 + 0.4 * 0.8 * 0.1))


def test_the_last_nodes_are_the_likeliest_wherever_they_hang() -> None:
    one_step, two_steps = expected_of_trees([0.5, 0.2], [0.4, 0.4])
    second, third, best_grandchild = 0.5 * 0.4, 0.3 * 0.4, 0.5 * 0.2
    assert one_step == pytest.approx((0.5, 0.5 + second, 0.5 + second + third))
    assert two_steps[:3] == pytest.approx(
        (0.5 + second, 0.5 + second + third, 0.5 + second + third + best_grandchild)
    ), "the second child needs no step of its own, but nothing likelier is there"


def test_what_hangs_from_the_last_nodes_is_not_there_yet() -> None:
    (only,) = expected_of_trees([0.5], [])
    assert only == (0.5,)
    first, _ = expected_of_trees([0.5, 1.0], [0.1])
    assert first == pytest.approx((0.5, 0.55)), "the sure grandchild comes with the second step"


def test_a_child_is_no_likelier_than_a_better_one() -> None:
    (sums,) = expected_of_trees([0.04], [0.5, 0.5])
    assert sums[-1] == pytest.approx(3 * 0.04)


def test_what_is_hardly_ever_reached_is_left_out_but_there_is_always_something_to_try() -> None:
    assert expected_of_trees([0.0, 0.5], [0.5]) == ((0.0,),)


def test_no_more_steps_and_last_nodes_than_there_may_be() -> None:
    grown = expected_of_trees([0.9] * 16, [0.3] * 7)
    assert len(grown) == 16
    assert max(map(len, grown)) == MOST_LAST
