"""The trees that simulated drafts propose, grown by the draft service's rule (`draft_service/drafters/branch.py`).

A node is its parent and its rank there: the draft's n-th choice. No token is known but those of the text, by their
ranks, so a tree grows on the draft's probability of its first choice at each position of the text: behind a wrong
token it is taken to be as sure as behind the right one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from draft_service.drafters.calibration import prior_chance
from draft_service.drafters.shape import DYNAMIC_WIDTH
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT


@dataclass(frozen=True, slots=True)
class ProposedTree:
    """Proposed tokens: a chain, or a tree in the order in which it was drafted.

    Attributes:
        parents, ranks, depths: of each node; the parent of those behind the last committed token is `ROOT`.
        computed: of the first so many nodes the draft has the rows.
    """

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    computed: int = 0

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Of the longest path."""
        return max(self.depths, default=0)

    def first(self, nodes: int) -> ProposedTree:
        """The first nodes alone."""
        if nodes >= len(self.parents):
            return self
        cut = slice(0, nodes)
        return ProposedTree(self.parents[cut], self.ranks[cut], self.depths[cut], min(self.computed, nodes))

    def within(self, depth: int) -> ProposedTree:
        """As far as no path is longer."""
        deeper = (node for node, reached in enumerate(self.depths) if reached > depth)
        return self.first(next(deeper, len(self.depths)))

    def accepted(self, ranks: Sequence[int], position: int) -> int:
        """The last accepted node where the text's tokens from `position` on stand at these ranks; `ROOT`: none."""
        node, end = ROOT, len(ranks)
        for other, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if parent == node and position < end and ranks[position] == rank:
                node, position = other, position + 1
        return node


NO_TREE = ProposedTree()


@cache
def chain(nodes: int) -> ProposedTree:
    """First choices alone."""
    return ProposedTree(tuple(range(ROOT, nodes - 1)), (1,) * nodes, tuple(range(1, nodes + 1)))


class Growth:
    """What is drafted from one position on, node by node: a chain, or the likeliest candidate each time.

    Args:
        chances: the draft's probability of its first choice, by position.
        position: of the first node.
        depth, nodes: the longest path, and most nodes; no more nodes than the former make a chain.
    """

    __slots__ = ("_candidates", "_chances", "_position", "depths", "parents", "ranks", "steps", "total")

    def __init__(self, chances: Sequence[float], position: int, depth: int, nodes: int) -> None:
        self.steps, self.total = depth, max(depth, nodes)
        self._chances, self._position = chances, position
        self.parents: Sequence[int] = _CHAIN.parents
        self.ranks: Sequence[int] = _CHAIN.ranks
        self.depths: Sequence[int] = _CHAIN.depths
        self._candidates: list[tuple[float, int, int, int]] | None = None
        if nodes > depth:
            self.parents, self.ranks, self.depths = [], [], []
            self._candidates = []
            self._offer(ROOT, 0, 1.0)

    def grown(self, rows: int) -> ProposedTree:
        """What so many computed rows have made; the last row adds all that may still be added."""
        nodes = rows if rows < self.steps else self.total
        self.reach(nodes)
        cut = slice(0, nodes)
        parents, ranks, depths = tuple(self.parents[cut]), tuple(self.ranks[cut]), tuple(self.depths[cut])
        return ProposedTree(parents, ranks, depths, min(rows, self.steps) - 1)

    def reach(self, nodes: int) -> None:
        """Grow until there are so many, or none is left to add."""
        candidates = self._candidates
        if candidates is None:
            return
        assert isinstance(self.parents, list) and isinstance(self.ranks, list) and isinstance(self.depths, list)
        while candidates and len(self.parents) < nodes:
            chance, parent, rank, depth = heapq.heappop(candidates)
            self.parents.append(parent)
            self.ranks.append(rank)
            self.depths.append(depth)
            if len(self.parents) < self.steps:  # the rows of others are never computed
                self._offer(len(self.parents) - 1, depth, -chance)

    def _offer(self, node: int, depth: int, above: float) -> None:
        place = self._position + depth
        if depth >= self.steps or place >= len(self._chances) or self._candidates is None:
            return
        for rank in range(1, DYNAMIC_WIDTH + 1):
            candidate = (-above * prior_chance(self._chances[place], rank), node, rank, depth + 1)
            heapq.heappush(self._candidates, candidate)


_CHAIN = chain(MAX_PROPOSAL_NODES)
