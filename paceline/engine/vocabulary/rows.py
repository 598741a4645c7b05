"""The contexts that a session of the draft's engine holds as rows, and the step that computes others. Pure.

The rows are a cache: a step computes the nodes that it needs and that have no row, wherever they branch off, and
drops those that it no longer needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.engine.interface import StepItem
from paceline.engine.vocabulary.spelling import ContextNode
from paceline.protocol.proposal import ROOT

Nodes = Sequence[ContextNode]


@dataclass(frozen=True)
class ContextStep:
    """The next step of a session: the rows that it will have, and where the logits of each context will be.

    Attributes:
        item: the step; None: nothing needs to be computed.
        start: rows before this one stay as they are.
        trunk: the first rows that will form a chain.
        rows: the nodes from `start` on: first those that have a row already, then the new ones.
        logits: for each context its place among the step's logit rows; None: there is no room for it.
    """

    item: StepItem | None
    start: int
    trunk: int
    rows: tuple[ContextNode, ...] = ()
    logits: tuple[int | None, ...] = ()


class ContextRows:
    """One session of the draft's engine.

    Invariant: engine row i holds `_rows[i]`, parents first; the first `_trunk` rows form a chain.
    """

    def __init__(self, session: int, max_rows: int, max_length: int) -> None:
        self._session, self._max_rows, self._max_length = session, max_rows, max_length
        self._rows: list[ContextNode] = []
        self._trunk = 0

    def plan(self, tips: Sequence[ContextNode | None], silent: Iterable[ContextNode]) -> ContextStep:
        """The step that gives the logits after `tips`, and keeps or computes rows for the `silent` contexts.

        Contexts without room are left out. Rows are cached and logits are not: a tip that has a row is computed
        again, and so are the nodes below it.
        """
        again = {tip for tip in tips if tip is not None and tip.row is not None}
        shared_rows = min((self._trunk, *(tip.row for tip in again if tip.row is not None)))
        contexts = _ContextSet(self._rows, shared_rows, self._max_rows, self._max_length)
        fitting = [tip if tip is not None and contexts.add(tip) else None for tip in tips]
        for tip in silent:
            contexts.add(tip)
        start, nodes = contexts.behind_trunk()
        kept_nodes = _kept_nodes(nodes, again, start)
        new_nodes = [node for node in nodes if node not in kept_nodes]
        trunk = start + _chain_length(self._rows[start - 1] if start else None, kept_nodes, new_nodes)
        logit_nodes = list(dict.fromkeys(tip for tip in fitting if tip is not None))
        item = self._item(start, trunk, kept_nodes, new_nodes, logit_nodes) if new_nodes else None
        places = {tip: place for place, tip in enumerate(logit_nodes)}
        logits = tuple(None if tip is None else places[tip] for tip in fitting)
        return ContextStep(item, start, trunk, (*kept_nodes, *new_nodes), logits)

    def apply(self, step: ContextStep) -> None:
        """Record a step as done; one without an item changes nothing."""
        if step.item is None:
            return
        for node in self._rows[step.start :]:
            node.row = None
        self._rows[step.start :] = step.rows
        self._trunk = step.trunk
        for row, node in enumerate(step.rows, start=step.start):
            node.row = row

    def _item(self, start: int, trunk: int, kept_nodes: Nodes, new_nodes: Nodes, logit_nodes: Nodes) -> StepItem:
        tree = [*kept_nodes[trunk - start :], *new_nodes]
        places = {node: place for place, node in enumerate(tree)}
        parents = tuple(ROOT if node.parent is None else places.get(node.parent, ROOT) for node in tree)
        kept_rows = tuple(node.row for node in kept_nodes if node.row is not None)
        base = start + len(kept_nodes)
        first = base - trunk
        return StepItem(
            session=self._session,
            base_length=base,
            token_ids=tuple(node.token for node in new_nodes),
            parents=() if parents == tuple(range(-1, len(tree) - 1)) else parents,
            kept_rows=() if kept_rows == tuple(range(start, base)) else kept_rows,
            logit_rows=tuple(places[tip] - first for tip in logit_nodes),
            trunk_length=trunk,
        )


class _ContextSet:
    """Contexts that a step needs, with their ancestors, while there is room; the first `trunk` rows are reused."""

    def __init__(self, rows: Sequence[ContextNode], trunk: int, max_rows: int, max_length: int) -> None:
        self._rows, self._trunk = rows, trunk
        self._max_rows, self._max_length = max_rows, max_length
        self._entries: set[int] = set()
        self._nodes: dict[ContextNode, None] = {}

    def add(self, tip: ContextNode) -> bool:
        """Add a context; returns whether there was room for it."""
        path: list[ContextNode] = []
        node: ContextNode | None = tip
        while node is not None and node not in self._nodes and not self._in_trunk(node):
            path.append(node)
            node = node.parent
        if self._trunk + len(self._nodes) + len(path) > self._max_rows or tip.length > self._max_length:
            return False
        if node not in self._nodes:
            self._entries.add(-1 if node is None or node.row is None else node.row)
        self._nodes.update(dict.fromkeys(path))
        return True

    def behind_trunk(self) -> tuple[int, list[ContextNode]]:
        """The number of trunk rows that all contexts share, and the nodes behind these, parents first."""
        low, high = min(self._entries, default=self._trunk - 1), max(self._entries, default=-1)
        nodes = [*self._rows[low + 1 : high + 1], *self._nodes]
        return low + 1, sorted(nodes, key=lambda node: node.length)

    def _in_trunk(self, node: ContextNode) -> bool:
        return node.row is not None and node.row < self._trunk


def _kept_nodes(nodes: Sequence[ContextNode], again: set[ContextNode], start: int) -> list[ContextNode]:
    """Nodes whose rows can be reused, in row order: each one's parent is reused too, or in the trunk."""
    kept_nodes: dict[ContextNode, None] = {}
    for node in nodes:
        parent = node.parent
        in_place = parent is None or parent in kept_nodes or (parent.row is not None and parent.row < start)
        if node.row is not None and node not in again and in_place:
            kept_nodes[node] = None
    return sorted(kept_nodes, key=lambda node: node.row or 0)


def _chain_length(
    parent: ContextNode | None, kept_nodes: Sequence[ContextNode], new_nodes: Sequence[ContextNode]
) -> int:
    """The number of kept nodes that all others descend from: they join the trunk."""
    branches: dict[ContextNode | None, int] = {}
    for node in (*kept_nodes, *new_nodes):
        branches[node.parent] = branches.get(node.parent, 0) + 1
    for count, node in enumerate(kept_nodes):
        if node.parent is not parent or branches[parent] > 1:
            return count
        parent = node
    return len(kept_nodes)
