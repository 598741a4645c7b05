"""One session's tree of tokens after the committed ones, and the layout of its rows in the engine. Pure.

The tree hangs from the last committed token. A node is a token after a path. Its row is computed once
and stays: a commit moves the root down, the rows on the way join the trunk, the nodes below the new root
stay, and the rest is dropped when the next step compacts the rows.

Rows that read the target's features are an exception: a row that was computed before the features of
the token before it had come is computed again once they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

from draft_service.drafters.draws import Distribution
from paceline.engine.interface import StepItem
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT

TREE_ROWS = 3 * MAX_PROPOSAL_NODES
"""Most rows of a session's tree: a proposal under verification, one that is drafted, and branches in the rest."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Node:
    """A token at an absolute `position`.

    `row` is its place in the engine and `distribution` that of the next token; both are None until
    its row is computed, which needs its parent's. Parents refer to their children and not the other
    way round, so dropped nodes are freed at once. A full garbage collection would stop the service for
    as long as a round takes.
    """

    token: int
    position: int
    parent_ref: ReferenceType[Node] | None = field(default=None, repr=False)
    row: int | None = None
    distribution: Distribution | None = field(default=None, repr=False)
    children: dict[int, Node] = field(default_factory=dict, repr=False)

    @property
    def parent(self) -> Node | None:
        """The node before this one; None: this is a root, or the parent was dropped."""
        return None if self.parent_ref is None else self.parent_ref()

    def child(self, token: int) -> Node:
        """The child for `token`, made if it is new."""
        child = self.children.get(token)
        if child is None:
            child = self.children[token] = Node(token, self.position + 1, ref(self))
        return child

    def subtree(self) -> Iterator[Node]:
        """This node and all below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class DraftTree:
    """The tree of one session and the layout of its rows.

    Invariant: engine rows [0, `_trunk`) are those of `committed[:_trunk]`. `_committed_nodes` are the computed nodes
    that were committed since, and `_tree_nodes` the computed nodes below the root, parents first; their rows are
    wherever the last step put them. `_tree_nodes` is empty unless the root's row is computed.

    Where rows read features, the features before position `features_end` have come or are lost for good. The first
    `_final_rows` rows have read all that they ever will: the row at a position reads the features of the one before.
    """

    def __init__(
        self,
        session: int,
        prefix: Sequence[int],
        max_rows: int,
        *,
        reads_features: bool = False,
        whole_trunk: bool = False,
    ) -> None:
        """Begin with a prefix. `whole_trunk`: the engine can drop all rows of a trunk, or none."""
        self.committed = list(prefix)
        self.root = Node(prefix[-1], len(prefix) - 1)
        self._session = session
        self._max_rows = max_rows
        self._prefix_length = len(prefix)
        self._trunk = self._stepped_trunk = 0  # the second is that of the last step, before its rows
        self._committed_nodes: list[Node] = []
        self._tree_nodes: list[Node] = []
        self.reads_features, self._whole_trunk = reads_features, whole_trunk
        self.features_end = 0
        self._final_rows = 0

    @property
    def lag(self) -> int:
        """The number of committed tokens whose rows are not computed; 0: the root's row is."""
        return len(self.committed) - self._trunk - len(self._committed_nodes)

    @property
    def in_prefix(self) -> bool:
        """Whether rows of the opening's prefix are still to be computed."""
        return self._trunk < self._prefix_length

    @property
    def room(self) -> int:
        """The number of rows that the tree can still take."""
        return min(self._max_rows - len(self.committed), TREE_ROWS) - len(self._tree_nodes)

    def path(self, node: Node) -> list[int]:
        """The tokens from below the root down to a node of the tree."""
        tokens: list[int] = []
        while node is not self.root:
            tokens.append(node.token)
            node = _parent(node)
        return tokens[::-1]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens and move the root to the last of them."""
        for token in token_ids:
            self.root = self.root.child(token)
            self.committed.append(token)
            if self.root.row is not None:
                self._committed_nodes.append(self.root)
        self.root.parent_ref = None
        descendants = {*self.root.subtree()} - {self.root}
        self._tree_nodes = [node for node in self._tree_nodes if node in descendants]

    def free(self, node: Node) -> None:
        """Drop the rows of a node and of all below it; the nodes stay, to be computed again."""
        subtree = {*node.subtree()}
        for each in subtree:
            each.row = each.distribution = None
        self._tree_nodes = [each for each in self._tree_nodes if each not in subtree]

    def lag_nodes(self, lag_rows: int, first: int) -> list[Node]:
        """The next `lag_rows` committed tokens at positions from `first` on; not the root, nor part of the tree."""
        row_count = len(self.committed) - self.lag
        last = min(row_count + lag_rows, len(self.committed) - 1)
        return [Node(self.committed[position], position) for position in range(max(row_count, first), last)]

    def forget(self) -> None:
        """Drop everything after the committed tokens, and the distribution of the last of them."""
        rows = min(len(self.committed) - self.lag, len(self.committed) - 1)
        self._roll_back(0 if self._whole_trunk and rows < self._stepped_trunk else rows)

    def note_features(self, positions: int) -> None:
        """Note that the features of the first `positions` positions have come, or are lost for good."""
        self.features_end = max(self.features_end, positions)

    def settle(self) -> None:
        """Drop rows that were computed without features that have come since."""
        row_count = len(self.committed) - self.lag
        if self.reads_features and self._final_rows < row_count and self._final_rows <= self.features_end:
            self._roll_back(self._final_rows)

    def is_final(self, node: Node) -> bool:
        """Whether a computed row has read all the features that it ever will."""
        return not self.reads_features or node.position < self._final_rows

    def _roll_back(self, rows: int) -> None:
        """Drop all rows but those of the first `rows` committed tokens."""
        del self._committed_nodes[max(rows - self._trunk, 0) :]
        self._trunk, self._stepped_trunk = min(self._trunk, rows), min(self._stepped_trunk, rows)
        self._final_rows = min(self._final_rows, rows)
        self._tree_nodes = []
        self.root = Node(self.committed[-1], len(self.committed) - 1)

    def item(self, lag_rows: int, nodes: Sequence[Node], read: int = 0) -> StepItem:
        """The step that computes the next `lag_rows` committed tokens, then `nodes`, parents first.

        Its logit rows are, in this order: the last `read` rows of the lag before the root, the root's if
        the step reaches it, and each node's. Nodes need the root's row, computed earlier or as the last
        of the lag.
        """
        reaches_root = 0 < lag_rows == self.lag
        assert not nodes or reaches_root or not self.lag, "nodes hang from the root"
        kept_rows = tuple(node.row for node in (*self._committed_nodes, *self._tree_nodes) if node.row is not None)
        trunk = self._trunk + len(self._committed_nodes)
        base = trunk + len(self._tree_nodes)
        item = StepItem(
            session=self._session,
            base_length=base,
            token_ids=(*self.committed[trunk : trunk + lag_rows], *(node.token for node in nodes)),
            parents=self._parents(lag_rows, nodes),
            kept_rows=() if kept_rows == tuple(range(self._trunk, base)) else kept_rows,
            logit_rows=tuple(range(lag_rows - reaches_root - read, lag_rows + len(nodes))),
            trunk_length=trunk,
        )
        self._stepped_trunk = trunk
        self._place(trunk + lag_rows, nodes)
        return item

    def _parents(self, lag_rows: int, nodes: Sequence[Node]) -> tuple[int, ...]:
        """Parents of a step's tree rows: the lag as a chain, the computed nodes, the new ones."""
        tree = (*self._tree_nodes, *nodes)
        places = {node: lag_rows + place for place, node in enumerate(tree)}
        places[self.root] = lag_rows - 1 if lag_rows else ROOT
        parents = (*range(-1, lag_rows - 1), *(places[_parent(node)] for node in tree))
        return () if parents == tuple(range(-1, len(parents) - 1)) else parents

    def _place(self, trunk: int, nodes: Sequence[Node]) -> None:
        if self._final_rows == self._trunk + len(self._committed_nodes):
            self._final_rows = min(trunk, self.features_end + 1)
        self._trunk = trunk
        self._committed_nodes = []
        self._tree_nodes += nodes
        if not self.lag:
            self.root.row = trunk - 1
        for row, node in enumerate(self._tree_nodes, start=trunk):
            node.row = row


def _parent(node: Node) -> Node:
    parent = node.parent
    assert parent is not None, "only the root has none"
    return parent
