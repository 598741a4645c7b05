"""What a simulated session's draft prepares for the outcomes of the round under verification, most probable first.

Rows are computed in the order of the service's own rule (`draft_service/drafters/speculation.py`): a node is worth
the product of chances along its path, and less if its proposal has a token already. Every outcome's rows are
counted; what they bring matters for the one that comes true alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.drafters.speculation import DEEPER, WORTHLESS
from paceline.protocol.proposal import ROOT
from paceline_lab.simulate.trees import Growth, ProposedTree

VERIFIED = -1
"""In place of a rank: the row of a node that is under verification."""


@dataclass(frozen=True)
class DraftedBefore:
    """What was drafted behind the last committed token before it was known: so many rows, its own the first."""

    growth: Growth
    rows: int

    def rows_beyond(self, nodes: int) -> dict[tuple[int, int], int]:
        """Rows of the proposals for the outcomes of a round that proposes the first nodes, by parent and rank."""
        growth, found = self.growth, dict[tuple[int, int], int]()
        growth.reach(self.rows - 1)
        tops: dict[int, tuple[int, int]] = {}
        for node in range(nodes, min(self.rows - 1, len(growth.parents))):
            parent = growth.parents[node]
            tops[node] = top = tops.get(parent, (parent, growth.ranks[node]))
            found[top] = found.get(top, 0) + 1
        return found


class OutcomeDrafting:
    """One round's outcomes. A verified node is its place in the round's tree, `ROOT` the last committed token.

    Args:
        base: position of the round's first token.
        tree: what the round proposes.
        own: whether the draft proposed it itself, so that its choices are among the nodes.
        true_node, rank: the outcome that will come true, and the next token's rank behind it.
        fan_out, depth, nodes: outcomes for each node; the longest path and most nodes of each outcome's proposal.
        chances: the draft's probability of its first choice, by position.
        chance: chance of a rank by that probability.
    """

    __slots__ = (
        "_above", "_begun", "_chance", "_chances", "_computed", "_depth", "_fan_out", "_growths", "_nodes", "_orders",
        "_own", "_queue", "_rank", "_reached", "_taken", "_tree", "_true", "base", "grown",
    )  # fmt: skip

    def __init__(
        self,
        base: int,
        tree: ProposedTree,
        own: bool,
        true_node: int,
        rank: int,
        fan_out: int,
        depth: int,
        nodes: int,
        chances: Sequence[float],
        chance: Callable[[float, int], float],
    ) -> None:
        self.base, self._tree, self._own = base, tree, own
        self._true, self._rank = true_node, rank
        self._fan_out, self._depth, self._nodes = fan_out, depth, nodes
        self._chances, self._chance = chances, chance
        self._queue: list[tuple[float, int, int, int, int, float]] = []
        self._taken: list[tuple[float, int, int, int, int, float]] = []
        self._orders = 0
        self._growths: dict[int, Growth] = {}
        self._reached: dict[int, list[float]] = {}
        """Of the nodes behind an outcome, given it, by the outcome's position."""
        self.grown: list[float] = []
        """When each row of the true outcome's proposal was computed."""
        self._begun: dict[tuple[int, int], int] = {}
        """Rows of an outcome's proposal that are computed already."""
        self._computed = {ROOT}
        """Verified nodes whose rows are computed."""
        self._above = {ROOT: 1.0}

    def begin(self, kept: DraftedBefore | None, now: float) -> None:
        """The draft has been told of the round; `kept`: what it has drafted behind the last committed token."""
        tree, computed = self._tree, self._tree.computed
        if kept is not None and self._own:
            computed = kept.rows - 1
            self._begun = kept.rows_beyond(len(tree))
        self._expand(ROOT, now)
        for node, (parent, rank, depth) in enumerate(zip(tree.parents, tree.ranks, tree.depths, strict=True)):
            self._above[node] = self._above[parent] * self._of_rank(self.base + depth - 1, rank)
            if self._own and node < computed:
                self._computed.add(node)
                self._expand(node, now)
            else:
                self._push(self._above[node], node, VERIFIED, 0, 0.0)

    @property
    def best(self) -> float:
        """Worth of the row that comes next; 0: there is none."""
        return -self._queue[0][0] if self._queue else 0.0

    @property
    def has_taken(self) -> bool:
        """Whether the step that runs, or begins, has a row of it."""
        return bool(self._taken)

    def take(self) -> None:
        """The next row is computed in this step."""
        self._taken.append(heapq.heappop(self._queue))

    def absorb(self, now: float) -> None:
        """The rows that were taken are computed."""
        taken, self._taken = self._taken, []
        for _worth, _, node, rank, rows, floor in taken:
            if rank == VERIFIED:
                self._computed.add(node)
                self._expand(node, now)
            else:
                self._grow(node, rank, rows, floor, now)

    @property
    def kept(self) -> DraftedBefore | None:
        """Of the outcome that came true; None: nothing."""
        rows = len(self.grown)
        return DraftedBefore(self._growth(self._place(self._true)), rows) if rows else None

    def comes_to(self, committed: int) -> bool:
        """Whether that many committed tokens are the outcome."""
        return committed == self._place(self._true) + 1

    def drafted(self, came: float, room: int) -> ProposedTree | None:
        """What was drafted for the outcome that came true until then; None: nothing."""
        rows = sum(at <= came for at in self.grown)
        return self._growth(self._place(self._true)).grown(rows).within(room) if rows and room > 0 else None

    def true_rows(self, ranks: Sequence[int]) -> int:
        """Tokens of the answer whose rows are computed, now that the round has its outcome."""
        path, node = [], self._true
        while node != ROOT:
            path.append(node)
            node = self._tree.parents[node]
        rows = self.base
        for node in reversed(path):
            if node not in self._computed:
                return rows
            rows += 1
        if not self.grown:
            return rows
        rows += 1
        growth, node = self._growth(self._place(self._true)), ROOT
        growth.reach(len(self.grown) - 1)
        for other in range(min(len(self.grown) - 1, len(growth.parents))):
            if growth.parents[other] == node and rows < len(ranks) and growth.ranks[other] == ranks[rows]:
                node, rows = other, rows + 1
        return rows

    def _place(self, node: int) -> int:
        """Position of the token that follows a node."""
        return self.base + (self._tree.depths[node] if node != ROOT else 0)

    def _expand(self, node: int, now: float) -> None:
        """List the outcomes behind a verified node whose row is computed."""
        if self._place(node) >= len(self._chances):
            return
        tree, left, rank = self._tree, self._fan_out, 0
        behind = zip(tree.parents, tree.ranks, strict=True) if self._own else ()
        proposed = {rank for parent, rank in behind if parent == node}
        while left:
            rank += 1
            if rank in proposed:
                continue
            left -= 1
            weight = self._above_outcome(node, rank)
            begun = self._begun.get((node, rank), 0)
            if not begun and weight >= WORTHLESS:
                self._push(weight, node, rank, 0, weight)
            floor = weight
            for rows in range(begun):
                floor = self._grow(node, rank, rows, floor, now, queue=rows == begun - 1)

    def _grow(self, node: int, rank: int, rows: int, floor: float, now: float, *, queue: bool = True) -> float:
        """Another row of an outcome's proposal is computed; returns the least chance among its nodes."""
        if node == self._true and rank == self._rank:
            self.grown.append(now)
        floor = min(floor, self._above_outcome(node, rank) * self._chance_behind(self._place(node), rows))
        if queue and rows + 1 < self._depth and DEEPER * floor >= WORTHLESS:
            self._push(DEEPER * floor, node, rank, rows + 1, floor)
        return floor

    def _above_outcome(self, node: int, rank: int) -> float:
        return self._above[node] * self._of_rank(self._place(node), rank)

    def _push(self, worth: float, node: int, rank: int, rows: int, floor: float) -> None:
        self._orders += 1
        heapq.heappush(self._queue, (-worth, self._orders, node, rank, rows, floor))

    def _of_rank(self, place: int, rank: int) -> float:
        return self._chance(self._chances[place], rank) if place < len(self._chances) else 0.0

    def _growth(self, place: int) -> Growth:
        """What is drafted behind an outcome at this position, whatever token it is."""
        if place not in self._growths:
            self._growths[place] = Growth(self._chances, place + 1, self._depth, self._nodes)
        return self._growths[place]

    def _chance_behind(self, place: int, node: int) -> float:
        """Of a node of an outcome's proposal, given the outcome; 0: there is no such node."""
        growth, reached = self._growth(place), self._reached.setdefault(place, [])
        while len(reached) <= node:
            growth.reach(len(reached) + 1)
            following = len(reached)
            if following >= len(growth.parents):
                return 0.0
            parent = growth.parents[following]
            above = 1.0 if parent == ROOT else reached[parent]
            reached.append(above * self._of_rank(place + growth.depths[following], growth.ranks[following]))
        return reached[node]
