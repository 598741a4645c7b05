"""The shape that a budget allows, and proposals that grow within it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, Acceptance

DYNAMIC_WIDTH = 8
"""Most children of a node in a dynamic tree."""


@dataclass(frozen=True)
class Shape:
    """Longest path, most nodes, and how the nodes are chosen.

    Static: a node has `widths[d - 1]` children at depth d, and 1 beyond the last width; no widths make a chain.
    Dynamic: each step adds the most probable candidate, and the last step all nodes that may still be added. These
    need no further row, so `max_depth` steps of one row make the whole tree.
    """

    max_depth: int
    max_nodes: int
    widths: tuple[int, ...] = ()
    dynamic: bool = False

    def width(self, depth: int) -> int:
        """Most children that a node gets at `depth`; the root's children have depth 1."""
        if self.dynamic:
            return DYNAMIC_WIDTH
        return self.widths[depth - 1] if depth <= len(self.widths) else 1

    @property
    def widest(self) -> int:
        """Most children of any node."""
        return max((1, *self.widths), default=1) if not self.dynamic else DYNAMIC_WIDTH


def shape_of(budget: DraftBudget, acceptance: Acceptance, room: int = MAX_PROPOSAL_NODES) -> Shape:
    """The shape that a budget allows. Rejection and block acceptance take chains only.

    `room` is the number of tokens that still fit into the context. Widths above 1 ask for a static tree. More nodes
    than tokens, without widths, ask for a dynamic one.
    """
    depth = max(0, min(budget.max_tokens, MAX_PROPOSAL_NODES, room))
    coupled = acceptance is Acceptance.COUPLED
    if coupled and not budget.tree_widths and budget.max_nodes > budget.max_tokens > 0:
        nodes = min(budget.max_nodes, MAX_PROPOSAL_NODES)
        return Shape(depth, nodes, dynamic=True)
    tree = coupled and any(width > 1 for width in budget.tree_widths)
    limit = MAX_PROPOSAL_NODES if tree else min(budget.max_tokens, MAX_PROPOSAL_NODES)
    max_nodes = min(budget.max_nodes, limit) if budget.max_nodes else limit
    return Shape(depth, max_nodes, budget.tree_widths if tree else ())
