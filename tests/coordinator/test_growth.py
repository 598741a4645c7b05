"""What the policy expects of a tree: by hand-made sums, and as the draft service grows it by the same chances."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest

from coordinator.policy.growth import MOST_LAST, expected_of_trees
from draft_service.drafters.branch import Branch
from draft_service.drafters.draws import CoupledDraws, Distribution, NextToken
from draft_service.drafters.shape import DYNAMIC_WIDTH, shape_of
from draft_service.drafters.tree import Node
from paceline.costs.acceptance import prior_chance
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams


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


DRAWS = CoupledDraws(SamplingParams(), NoiseKey(1))
HALVES = [0.5] * (MOST_LAST - 1)
"""Behind the best child a branch ranks by a prior that halves by rank: each child gets half of what is left."""


def best_q(chance: float) -> float:
    """The q of a best child that the prior gives this chance."""
    return (chance - prior_chance(0.0, 1)) / (prior_chance(1.0, 1) - prior_chance(0.0, 1))


def drafted(by_depth: Sequence[float], nodes: int) -> tuple[Branch, int]:
    """A branch of so many nodes, and in how many steps of one row it was made beyond its root's."""
    root, steps = Node(0, 0), 0
    budget = DraftBudget(max_tokens=len(by_depth), max_nodes=nodes)
    branch = Branch(root, shape_of(budget, Acceptance.COUPLED), DRAWS, prior_chance)
    while not branch.done:
        (index,) = branch.nodes_to_compute()
        node = branch.node(index)
        best = best_q(by_depth[node.position])
        ranked = tuple(NextToken(token, best / 2**token) for token in range(DYNAMIC_WIDTH))
        node.distribution = Distribution(ranked)
        branch.grow()
        steps += 1
    return branch, steps


@pytest.mark.parametrize("seed", range(12))
def test_a_tree_is_expected_to_bring_what_its_nodes_chances_add_up_to(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Multiples of the fiftieths that growth tells apart, within what the prior can give.
    by_depth = [round(50 * chance) / 50 for chance in rng.uniform(0.42, 0.94, 6)]
    expected = expected_of_trees(by_depth, HALVES)
    for depth in range(2, len(by_depth) + 1):
        for last in range(2, MOST_LAST + 1):
            branch, steps = drafted(by_depth[:depth], depth - 1 + last)
            assert steps == depth
            assert len(branch.nodes) == depth - 1 + last
            of_depth = expected_of_trees(by_depth[:depth], HALVES)[-1]
            assert of_depth[last - 1] == pytest.approx(sum(branch.chances), abs=1e-9)
            assert expected[depth - 1] == pytest.approx(of_depth), "a longer tree begins as a shorter one"


def test_a_chain_is_expected_to_bring_what_its_nodes_chances_add_up_to() -> None:
    by_depth = [0.9, 0.5, 0.7]
    branch, steps = drafted(by_depth, len(by_depth))
    assert steps == len(by_depth)
    chains = [sums[0] for sums in expected_of_trees(by_depth, ())]
    assert chains == pytest.approx(list(accumulate(branch.chances)))
