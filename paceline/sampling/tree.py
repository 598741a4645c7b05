"""Shapes of proposals: parents as integers (topological order, `ROOT` for a child of the last committed token)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.proposal import ROOT, Proposal


def ancestor_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """The nodes that each node sees: itself and its ancestors. Returns [n, n], row = the node that sees."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask


def children(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The nodes that hang from `node` (or from `ROOT`), ascending."""
    return tuple(child for child, parent in enumerate(parents) if parent == node)


def child_with_token(proposal: Proposal, node: int, token_id: int) -> int | None:
    """The first child of `node` that proposes `token_id`, if any."""
    for child in range(node + 1, len(proposal)):
        if proposal.parents[child] == node and proposal.token_ids[child] == token_id:
            return child
    return None


def is_leaf(parents: Sequence[int], node: int) -> bool:
    """Whether nothing hangs from `node`."""
    return node not in parents
