"""Which contexts a session of the draft's engine holds as rows, and the step that computes others. Pure.

The rows are a cache: what a context needs and is not held is computed, wherever it branches off, and what
nothing needs any more makes way.
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
    """The next step of a session: what it will hold, and where the logits that were asked for will be.

    Rows before `start` stay. Of `rows`, those behind them, the first `kept` are held already. `logits` are places
    among the step's logit rows, for each context asked for; None: there is no room for it.
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

    def plan(self, asked: Sequence[ContextNode | None], silent: Iterable[ContextNode]) -> ContextStep:
        """The step that gives the logits after the contexts asked for, and has rows of the `silent` ones, too.

        What there is no room for is left out. Logits are not held as rows are: a row that is asked for is computed
        again, and what hangs from it, too.
        """
        again = {tip for tip in asked if tip is not None and tip.row is not None}
        shared = min((self._trunk, *(tip.row for tip in again if tip.row is not None)))
        needed = _Needed(self._rows, shared, self._max_rows, self._max_length)
        found = [tip if tip is not None and needed.add(tip) else None for tip in asked]
        for tip in silent:
            needed.add(tip)
        start, nodes = needed.behind_trunk()
        held = _held(nodes, again, start)
        new = [node for node in nodes if node not in held]
        trunk = start + _chained(self._rows[start - 1] if start else None, held, new)
        wanted = list(dict.fromkeys(tip for tip in found if tip is not None))
        item = self._item(start, trunk, held, new, wanted) if new else None
        places = {tip: place for place, tip in enumerate(wanted)}
        logits = tuple(None if tip is None else places[tip] for tip in found)
        return ContextStep(item, start, trunk, (*held, *new), logits)

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

    def _item(self, start: int, trunk: int, held: Nodes, new: Nodes, wanted: Nodes) -> StepItem:
        tree = [*held[trunk - start :], *new]
        places = {node: place for place, node in enumerate(tree)}
        parents = tuple(ROOT if node.parent is None else places.get(node.parent, ROOT) for node in tree)
        kept_rows = tuple(node.row for node in held if node.row is not None)
        base = start + len(held)
        first = base - trunk
        return StepItem(
            session=self._session,
            base_length=base,
            token_ids=tuple(node.token for node in new),
            parents=() if parents == tuple(range(-1, len(tree) - 1)) else parents,
            kept_rows=() if kept_rows == tuple(range(start, base)) else kept_rows,
            logit_rows=tuple(places[tip] - first for tip in wanted),
            trunk_length=trunk,
        )


class _Needed:
    """Contexts that a step needs, with all before them, as far as there is room; the first `trunk` rows serve."""

    def __init__(self, held: Sequence[ContextNode], trunk: int, max_rows: int, max_length: int) -> None:
        self._held, self._trunk = held, trunk
        self._max_rows, self._max_length = max_rows, max_length
        self._entries: set[int] = set()
        self._found: dict[ContextNode, None] = {}

    def add(self, tip: ContextNode) -> bool:
        """Whether there was room for a context."""
        path: list[ContextNode] = []
        node: ContextNode | None = tip
        while node is not None and node not in self._found and not self._in_trunk(node):
            path.append(node)
            node = node.parent
        if self._trunk + len(self._found) + len(path) > self._max_rows or tip.length > self._max_length:
            return False
        if node not in self._found:
            self._entries.add(-1 if node is None or node.row is None else node.row)
        self._found.update(dict.fromkeys(path))
        return True

    def behind_trunk(self) -> tuple[int, list[ContextNode]]:
        """Rows of the trunk that all of them share, and the contexts needed behind these, parents first."""
        low, high = min(self._entries, default=self._trunk - 1), max(self._entries, default=-1)
        nodes = [*self._held[low + 1 : high + 1], *self._found]
        return low + 1, sorted(nodes, key=lambda node: node.length)

    def _in_trunk(self, node: ContextNode) -> bool:
        return node.row is not None and node.row < self._trunk


def _held(nodes: Sequence[ContextNode], again: set[ContextNode], start: int) -> list[ContextNode]:
    """Those whose rows serve, in the order of their rows: each hangs from one that serves, or from the trunk."""
    found: dict[ContextNode, None] = {}
    for node in nodes:
        above = node.parent
        in_place = above is None or above in found or (above.row is not None and above.row < start)
        if node.row is not None and node not in again and in_place:
            found[node] = None
    return sorted(found, key=lambda node: node.row or 0)


def _chained(above: ContextNode | None, held: Sequence[ContextNode], new: Sequence[ContextNode]) -> int:
    """How many of the held rows everything else hangs from: they join the trunk."""
    branches: dict[ContextNode | None, int] = {}
    for node in (*held, *new):
        branches[node.parent] = branches.get(node.parent, 0) + 1
    for count, node in enumerate(held):
        if node.parent is not above or branches[above] > 1:
            return count
        above = node
    return len(held)
