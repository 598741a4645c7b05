"""One proposal in the making: the tokens drafted below one node of the tree.

The order of its nodes depends only on the path to its root, the seed and the budget, and never on the time at which
rows are computed. So a proposal drafted before its outcome is known has the same tokens as one drafted after it. The
shorter of the two is a prefix of the longer, and a branch can be used at any time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from draft_service.drafters.draws import Draws, NextToken
from draft_service.drafters.shape import Shape
from draft_service.drafters.tree import Node
from paceline.costs.acceptance import prior_chance
from paceline.protocol.proposal import ROOT, Proposal, SparseDistribution

Odds = Callable[[float, int], float]
"""P(the target's token is the child of a rank), by the best child's q and that rank."""


class Branch:
    """The nodes drafted below `root`, whose index is `ROOT`, in order; append-only.

    `chances[i]` is the probability, given the root, that the target's text runs through node i.
    A static shape, or a chain, grows by levels: a node gets its children after the nodes before it
    have theirs. A dynamic shape grows by chances: it takes the most probable candidates once all
    nodes are computed. The branch ends before the first node whose chance is below `least_chance`.
    """

    def __init__(self, root: Node, shape: Shape, draws: Draws, odds: Odds, least_chance: float = 0.0) -> None:
        self.root = root
        self.nodes: list[Node] = []
        self.chances: list[float] = []
        self.parents: list[int] = []
        self._shape, self._draws, self._odds = shape, draws, odds
        self._least_chance, self._is_over = least_chance, False
        self._ranks: list[int] = []
        self._q: list[float] = []
        self._next = ROOT
        self._candidates: list[tuple[float, int, int, int, NextToken]] = []
        self.grow()

    @property
    def done(self) -> bool:
        """Whether no further row would add a node."""
        if self._is_over or len(self.nodes) >= self._shape.max_nodes or not self._shape.max_depth:
            return True
        if self._next == ROOT or self._candidates:
            return False
        return not any(self._expandable(node) for node in self.nodes[self._next :])

    def nodes_to_compute(self) -> list[int]:
        """Indices of the nodes, or `ROOT`, whose rows would add nodes, the most urgent first."""
        if self.done:
            return []
        rest = range(self._next, len(self.nodes))
        missing = [i for i in rest if self.node(i).distribution is None and self._expandable(self.node(i))]
        # A dynamic shape chooses among the children of all nodes; by levels each computed node adds children.
        return missing if self._shape.dynamic else missing[: self._shape.max_nodes - len(self.nodes)]

    def node(self, index: int) -> Node:
        """Node `index`, or the root."""
        return self.root if index == ROOT else self.nodes[index]

    def chance(self, index: int) -> float:
        """Probability of node `index`, given the root."""
        return 1.0 if index == ROOT else self.chances[index]

    def grow(self) -> bool:
        """Add every node that the computed rows determine, and return whether there was one."""
        old_count = len(self.nodes)
        if self._shape.dynamic:
            self._grow_by_chances()
        else:
            self._grow_by_levels()
        return len(self.nodes) > old_count

    def proposal(self, proposal_id: int, drafter: str) -> Proposal:
        """The proposal as far as it is drafted."""
        return Proposal(
            proposal_id,
            tuple(node.token for node in self.nodes),
            tuple(self._q),
            tuple(self.parents),
            self._supports(),
            drafter,
        )

    def _grow_by_levels(self) -> None:
        while not self.done and self.node(self._next).distribution is not None:
            parent = self._next
            self._next += 1
            best, children = self._children(parent)
            for rank, child in enumerate(children, start=1):
                if len(self.nodes) < self._shape.max_nodes:
                    self._add(parent, child, rank, best)

    def _grow_by_chances(self) -> None:
        while not self.done and not self.nodes_to_compute():
            for parent in range(self._next, len(self.nodes)):
                if self._expandable(self.node(parent)):
                    self._offer_children(parent)
            self._next = len(self.nodes)
            is_last = self._next >= self._shape.max_depth - 1
            count = self._shape.max_nodes - self._next if is_last else 1
            for _ in range(min(count, len(self._candidates))):
                _, parent, rank, _, child = heapq.heappop(self._candidates)
                self._add(parent, child, rank, self._children(parent)[0])

    def _offer_children(self, parent: int) -> None:
        """Add the children to the candidates, ranked by the fixed prior, since learned chances change with time."""
        best, children = self._children(parent)
        parent_chance = self._prior(parent)
        for rank, child in enumerate(children, start=1):
            chance = parent_chance * prior_chance(best, rank)
            heapq.heappush(self._candidates, (-chance, parent, rank, child.token, child))

    def _prior(self, index: int) -> float:
        chance = 1.0
        while index != ROOT:
            parent = self.parents[index]
            chance *= prior_chance(self._children(parent)[0], self._ranks[index])
            index = parent
        return chance

    def _children(self, index: int) -> tuple[float, list[NextToken]]:
        """The best child's q, and the children of a node whose row is computed."""
        node = self.node(index)
        assert node.distribution is not None, "its row is computed"
        width = self._shape.width(node.position + 1 - self.root.position)
        children = list(self._draws.proposed(node.distribution, width, node.position + 1, self.root.position))
        return children[0].q, children

    def _add(self, parent: int, child: NextToken, rank: int, best: float) -> None:
        chance = self.chance(parent) * self._odds(best, rank)
        self._is_over |= chance < self._least_chance
        if self._is_over:  # for all nodes after it, too
            return
        self.nodes.append(self.node(parent).child(child.token))
        self.chances.append(chance)
        self.parents.append(parent)
        self._ranks.append(rank)
        self._q.append(child.q)

    def _expandable(self, node: Node) -> bool:
        return node.position - self.root.position < self._shape.max_depth

    def _supports(self) -> tuple[SparseDistribution, ...]:
        distributions = [self.node(parent).distribution for parent in self.parents]
        return tuple(each.support for each in distributions if each is not None and each.support is not None)
