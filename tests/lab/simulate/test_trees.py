"""The simulator's trees are those that the draft service grows, and what is kept of them behind a verdict."""

from __future__ import annotations

import numpy as np
import pytest

from draft_service.drafters.branch import Branch
from draft_service.drafters.calibration import prior_chance
from draft_service.drafters.draws import CoupledDraws, Distribution, NextToken
from draft_service.drafters.shape import DYNAMIC_WIDTH, shape_of
from draft_service.drafters.tree import Node
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import ROOT, Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline_lab.simulate.speculating import DraftedBefore, OutcomeDrafting
from paceline_lab.simulate.trees import Growth, chain

DEPTH, NODES = 5, 9


@pytest.mark.parametrize("nodes", [DEPTH, NODES])
@pytest.mark.parametrize("seed", range(6))
def test_a_tree_grows_row_by_row_as_the_draft_service_grows_it(seed: int, nodes: int) -> None:
    chances = tuple(np.random.default_rng(seed).uniform(0.05, 0.95, DEPTH).tolist())
    shape = shape_of(DraftBudget(max_tokens=DEPTH, max_nodes=nodes), Acceptance.COUPLED)
    branch = Branch(Node(0, 0), shape, CoupledDraws(SamplingParams(), NoiseKey(1)), prior_chance)
    growth = Growth(chances, 0, DEPTH, nodes)
    for rows in range(1, DEPTH + 1):
        (index,) = branch.nodes_to_compute()
        node = branch.node(index)
        best = chances[node.position]
        node.distribution = Distribution(tuple(NextToken(each, best / 2**each) for each in range(DYNAMIC_WIDTH)))
        branch.grow()
        grown = growth.grown(rows)
        assert grown.parents == tuple(branch.parents)
        assert grown.ranks == tuple(1 + each.token for each in branch.nodes)
        assert grown.depths == tuple(each.position for each in branch.nodes)
        assert grown.computed == sum(each.distribution is not None for each in branch.nodes)
    assert branch.done


def test_the_path_is_accepted_that_the_text_takes() -> None:
    tree = Growth((0.1, 0.1, 0.1), 0, 3, 8).grown(3)
    assert [*zip(tree.parents, tree.ranks, strict=True)][:3] == [(ROOT, 1), (ROOT, 2), (0, 1)]
    first, second, deeper = range(3)
    assert tree.accepted((1, 1), 0) == deeper
    assert tree.accepted((7, 2, 1, 9), 1) == tree.parents.index(second), "a choice beside the first, and one below it"
    assert tree.accepted((1,), 0) == first
    assert tree.accepted((3, 1), 1) == first
    assert tree.accepted((9, 1), 0) == ROOT


def chance(best: float, rank: int) -> float:
    return best if rank == 1 else 0.1 / rank


def outcomes(base: int, nodes: int, true_node: int, rank: int) -> OutcomeDrafting:
    return OutcomeDrafting(base, chain(nodes), True, true_node, rank, 2, 4, 4, (0.9,) * 16, chance)


def test_what_was_drafted_beyond_a_proposal_is_there_at_once_if_the_text_goes_on_so() -> None:
    before = outcomes(0, 0, ROOT, 1)
    before.begin(None, 0.0)
    for now in range(4):
        before.take()
        before.absorb(float(now))
    kept = before.kept
    assert kept is not None and kept.rows == 4
    assert before.comes_to(1) and not before.comes_to(2)
    # Of the tokens 1 to 4 behind it one is proposed; with the rows of 1, 2 and 3 there are two of a next proposal.
    follows = outcomes(1, 1, 0, 1)
    follows.begin(kept, 10.0)
    assert follows.grown == [10.0, 10.0]
    drafted = follows.drafted(10.0, 8)
    assert drafted is not None and len(drafted) == 2
    assert follows.drafted(9.0, 8) is None
    turns = outcomes(1, 1, 0, 2)
    turns.begin(kept, 10.0)
    assert not turns.grown, "another token than the drafted one begins anew"


def test_rows_beyond_a_proposal_count_to_the_outcome_that_they_hang_from() -> None:
    growth = Growth((0.1,) * 8, 0, 6, 12)
    tree = growth.grown(5)
    beyond = DraftedBefore(growth, 6).rows_beyond(2)
    assert sum(beyond.values()) == 3, "six rows: the committed token's own, two proposed, three beyond"
    for parent, rank in beyond:
        assert parent in (ROOT, 0, 1)
        assert (parent, rank) in zip(tree.parents[2:], tree.ranks[2:], strict=True)
