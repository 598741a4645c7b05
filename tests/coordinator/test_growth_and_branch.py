"""What the policy expects of a tree is what the draft service grows, where both go by the same chances."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest

from coordinator.policy.growth import MOST_LAST, expected_of_trees
from draft_service.drafters.branch import Branch
from draft_service.drafters.calibration import prior_chance
from draft_service.drafters.draws import CoupledDraws, Distribution, NextToken
from draft_service.drafters.shape import DYNAMIC_WIDTH, shape_of
from draft_service.drafters.tree import Node
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams

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
