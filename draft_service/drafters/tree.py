"""One session's tree of tokens behind the committed ones, and which of its rows the engine holds. Pure.

The tree hangs from the last committed token. A node is a token after a path; its row, once computed,
is computed for good: a commit moves the root down, the rows on the way join the trunk, what still
hangs from the root stays, and the rest is dropped when the next step compacts the rows.

Rows that read the target's features are an exception: those that were computed before the features of
the token before them had come are computed again once they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

from draft_service.drafters.draws import Distribution
from paceline.engine.interface import StepItem
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT

TREE_ROWS = 3 * MAX_PROPOSAL_NODES
"""Most rows of a session's tree: a proposal under verification, one being drafted, branches in the rest."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Node:
    """A token at an absolute `position`.

    `row` is where the engine holds it and `distribution` what its logits said of the next token; both are
    None until its row is computed, which needs its parent's. Parents hold their children and
    not the other way round, so what a commit drops is freed at once. A full garbage collection
    would stop the service for as long as a round takes.
    """

    token: int
    position: int
    above: ReferenceType[Node] | None = field(default=None, repr=False)
    row: int | None = None
    distribution: Distribution | None = field(default=None, repr=False)
    children: dict[int, Node] = field(default_factory=dict, repr=False)

    @property
    def parent(self) -> Node | None:
        """The node before this one; None: a root, or nothing that the tree still holds."""
        return None if self.above is None else self.above()

    def child(self, token: int) -> Node:
        """The node of `token` after this one, made if it is new."""
        found = self.children.get(token)
        if found is None:
            found = self.children[token] = Node(token, self.position + 1, ref(self))
        return found

    def subtree(self) -> Iterator[Node]:
        """This node and all below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class DraftTree:
    """The tree of one session and the layout of its rows.

    Invariant: engine rows [0, `_trunk`) hold `committed[:_trunk]`. Then, wherever the last step put
    them, come `_joined`, the computed nodes that were committed since, and `_kept`, the computed
    nodes below the root, parents first. `_kept` is empty unless the root's row is computed.

    Where rows read features, those of the positions before `known` are there, or lost for good, and the first
    `_true` rows have read all that they ever will: the row at a position reads the one before.
    """

    def __init__(self, session: int, prefix: Sequence[int], max_rows: int, *, reads_features: bool = False) -> None:
        self.committed = list(prefix)
        self.root = Node(prefix[-1], len(prefix) - 1)
        self._session = session
        self._max_rows = max_rows
        self._prefix_length = len(prefix)
        self._trunk = 0
        self._joined: list[Node] = []
        self._kept: list[Node] = []
        self.reads_features = reads_features
        self.known = 0
        self._true = 0

    @property
    def lag(self) -> int:
        """Committed tokens whose rows are not computed; 0: the root's is."""
        return len(self.committed) - self._trunk - len(self._joined)

    @property
    def in_prefix(self) -> bool:
        """Whether rows of the prefix that the session was opened with are still to be computed."""
        return self._trunk < self._prefix_length

    @property
    def room(self) -> int:
        """Rows that the tree can still take."""
        return min(self._max_rows - len(self.committed), TREE_ROWS) - len(self._kept)

    def path(self, node: Node) -> list[int]:
        """Tokens behind the root down to a node of the tree."""
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
                self._joined.append(self.root)
        self.root.above = None
        below = {*self.root.subtree()} - {self.root}
        self._kept = [node for node in self._kept if node in below]

    def free(self, node: Node) -> None:
        """Drop the rows of a node and of all below it; the tokens stay, as tokens to be computed."""
        dropped = {*node.subtree()}
        for each in dropped:
            each.row = each.distribution = None
        self._kept = [each for each in self._kept if each not in dropped]

    def lag_nodes(self, lag_rows: int, first: int) -> list[Node]:
        """The next `lag_rows` committed tokens at positions from `first` on; not the root, nor part of the tree."""
        computed = len(self.committed) - self.lag
        last = min(computed + lag_rows, len(self.committed) - 1)
        return [Node(self.committed[at], at) for at in range(max(computed, first), last)]

    def forget(self) -> None:
        """Drop everything behind the committed tokens, and what the last of them said of the next."""
        self._roll_back(min(len(self.committed) - self.lag, len(self.committed) - 1))

    def know(self, positions: int) -> None:
        """Features are there, or lost for good, up to so many positions."""
        self.known = max(self.known, positions)

    def settle(self) -> None:
        """Drop the rows that were computed before the features had come that they can read now."""
        computed = len(self.committed) - self.lag
        if self.reads_features and self._true < computed and self._true <= self.known:
            self._roll_back(self._true)

    def is_true(self, node: Node) -> bool:
        """Whether a computed row has read all that it ever will."""
        return not self.reads_features or node.position < self._true

    def _roll_back(self, rows: int) -> None:
        """Keep the rows of the first `rows` committed tokens alone."""
        del self._joined[max(rows - self._trunk, 0) :]
        self._trunk = min(self._trunk, rows)
        self._true = min(self._true, rows)
        self._kept = []
        self.root = Node(self.committed[-1], len(self.committed) - 1)

    def item(self, lag_rows: int, nodes: Sequence[Node], read: int = 0) -> StepItem:
        """The step that computes the next `lag_rows` committed tokens, then `nodes`, parents first.

        Logits are asked for after the last `read` of the lag before the root, after the root, if the
        step reaches it, and after each node, in this order. Nodes need the root's row: computed before,
        or the last of the lag.
        """
        reaches_root = 0 < lag_rows == self.lag
        assert not nodes or reaches_root or not self.lag, "nodes hang from the root"
        kept_rows = tuple(node.row for node in (*self._joined, *self._kept) if node.row is not None)
        trunk = self._trunk + len(self._joined)
        base = trunk + len(self._kept)
        item = StepItem(
            session=self._session,
            base_length=base,
            token_ids=(*self.committed[trunk : trunk + lag_rows], *(node.token for node in nodes)),
            parents=self._parents(lag_rows, nodes),
            kept_rows=() if kept_rows == tuple(range(self._trunk, base)) else kept_rows,
            logit_rows=tuple(range(lag_rows - reaches_root - read, lag_rows + len(nodes))),
            trunk_length=trunk,
        )
        self._place(trunk + lag_rows, nodes)
        return item

    def _parents(self, lag_rows: int, nodes: Sequence[Node]) -> tuple[int, ...]:
        """Parents of the tree rows of a step: the lag as a chain, the kept nodes, the new ones."""
        tree = (*self._kept, *nodes)
        places = {node: lag_rows + place for place, node in enumerate(tree)}
        places[self.root] = lag_rows - 1 if lag_rows else ROOT
        parents = (*range(-1, lag_rows - 1), *(places[_parent(node)] for node in tree))
        return () if parents == tuple(range(-1, len(parents) - 1)) else parents

    def _place(self, trunk: int, nodes: Sequence[Node]) -> None:
        if self._true == self._trunk + len(self._joined):
            self._true = min(trunk, self.known + 1)
        self._trunk = trunk
        self._joined = []
        self._kept += nodes
        if not self.lag:
            self.root.row = trunk - 1
        for row, node in enumerate(self._kept, start=trunk):
            node.row = row


def _parent(node: Node) -> Node:
    parent = node.parent
    assert parent is not None, "only the root has none"
    return parent
