"""The shape that a budget allows, and proposals that grow within it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.types import MAX_PROPOSAL_NODES, ROOT, Acceptance, DraftBudget


@dataclass(frozen=True)
class Shape:
    """Longest path, most nodes, and the children of a node at each depth (1 past the end)."""

    max_depth: int
    max_nodes: int
    widths: tuple[int, ...] = ()

    def width(self, depth: int) -> int:
        """Children that a node gets at `depth`; the root's children have depth 1."""
        return self.widths[depth - 1] if depth <= len(self.widths) else 1


def shape_of(budget: DraftBudget, acceptance: Acceptance, room: int = MAX_PROPOSAL_NODES) -> Shape:
    """What a budget allows: rejection and block acceptance take chains, `room` is what the context leaves."""
    tree = acceptance is Acceptance.COUPLED and any(width > 1 for width in budget.tree_widths)
    limit = MAX_PROPOSAL_NODES if tree else min(budget.max_tokens, MAX_PROPOSAL_NODES)
    max_nodes = min(budget.max_nodes, limit) if budget.max_nodes else limit
    depth = max(0, min(budget.max_tokens, MAX_PROPOSAL_NODES, room))
    return Shape(depth, max_nodes, budget.tree_widths if tree else ())


class TreeBuilder:
    """Nodes in topological order; full once the shape's nodes are used up."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.token_ids: list[int] = []
        self.parents: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def full(self) -> bool:
        """Whether no node can be added."""
        return len(self) >= self._shape.max_nodes

    def add(self, parent: int, token_id: int) -> int | None:
        """Hang a token from a node (or `ROOT`); returns its index, None if there is no room."""
        if self.full:
            return None
        self.token_ids.append(token_id)
        self.parents.append(parent)
        return len(self) - 1

    def add_path(self, token_ids: Sequence[int]) -> None:
        """Hang a path from the root, as far as there is room."""
        node: int | None = ROOT
        for token_id in token_ids:
            assert node is not None, "checked below"
            node = self.add(node, token_id)
            if node is None:
                return
