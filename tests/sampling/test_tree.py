"""Shapes of proposals."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocol.proposal import ROOT, Proposal
from paceline.sampling.tree import ancestor_mask, children, is_leaf

parent_lists = st.lists(st.integers(0, 63), max_size=20).map(
    lambda raw: tuple(value % (node + 1) - 1 for node, value in enumerate(raw))
)


@given(parent_lists)
def test_mask_is_self_and_ancestors(parents: tuple[int, ...]) -> None:
    mask = ancestor_mask(parents)
    proposal = Proposal(1, (0,) * len(parents), (1.0,) * len(parents), parents)
    assert mask.shape == (len(parents), len(parents))
    for node in range(len(parents)):
        assert np.flatnonzero(mask[node]).tolist() == list(proposal.path(node))
    assert mask.sum(axis=1).tolist() == list(proposal.depths)


@given(parent_lists)
def test_children_partition_the_nodes(parents: tuple[int, ...]) -> None:
    nodes = [child for node in range(ROOT, len(parents)) for child in children(parents, node)]
    assert sorted(nodes) == list(range(len(parents)))
    assert [is_leaf(parents, n) for n in range(len(parents))] == [
        not children(parents, n) for n in range(len(parents))
    ]
