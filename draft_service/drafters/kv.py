"""What a drafter's KV session holds, against what is committed. Pure integers.

Rows are computed for drafted tokens before anyone knows whether they will be
accepted. After a commit the longest common prefix of the two is kept: accepted
rows are not computed again, the others are rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.engine.interface import StepItem
from paceline.types import ROOT


@dataclass
class DraftKV:
    """Rows in the engine: the first `base` are committed tokens, then a tree of drafted ones.

    Invariant: rows [0, base) hold `committed[:base]`; row base + i holds
    `tree_tokens[i]`, a child of row base + `tree_parents[i]` (`ROOT`: of row base - 1).
    """

    session: int
    committed: list[int]
    base: int = 0
    tree_tokens: list[int] = field(default_factory=list)
    tree_parents: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prefix_length = len(self.committed)

    @property
    def in_prefix(self) -> bool:
        """Whether rows of the prefix that the session was opened with are still to be computed."""
        return self.base < self._prefix_length

    @property
    def lag(self) -> int:
        """Committed tokens whose rows are not computed; the last one always counts, for its logits."""
        return len(self.committed) - self.base - len(self._accepted_path())

    def catch_up(self, rows: int, logits: bool) -> StepItem:
        """Compute the next `rows` committed tokens behind the rows that can be kept.

        `logits` asks for those after the last of them.
        """
        path = self._accepted_path()
        kept = self.base + len(path)
        in_place = path == list(range(len(path)))
        item = StepItem(
            session=self.session,
            base_length=kept,
            token_ids=tuple(self.committed[kept : kept + rows]),
            kept_rows=() if in_place else tuple(self.base + node for node in path),
            logit_rows=(rows - 1,) if logits else (),
        )
        self.base = kept + rows
        self.tree_tokens, self.tree_parents = [], []
        return item

    def extend(self, token_ids: Sequence[int], parents: Sequence[int], frontier: Sequence[int]) -> StepItem:
        """Compute the drafted tree as far as it is not computed, with logits after the `frontier` nodes.

        A chain goes on behind its last row. A step can hang new rows from each
        other and from the last kept row only, so a tree is computed anew from
        its root at each depth.
        """
        done = len(self.tree_tokens)
        chain = list(parents) == list(range(-1, len(parents) - 1))
        start = done if chain else 0
        item = StepItem(
            session=self.session,
            base_length=self.base + start,
            token_ids=tuple(token_ids[start:]),
            parents=() if chain else tuple(parents),
            logit_rows=tuple(node - start for node in frontier),
        )
        self.tree_tokens, self.tree_parents = list(token_ids), list(parents)
        return item

    def _accepted_path(self) -> list[int]:
        """The longest path of drafted rows that was committed, short of the last token."""
        path: list[int] = []
        node = ROOT
        for token in self.committed[self.base : -1]:
            child = self._child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _child(self, node: int, token: int) -> int | None:
        for child in range(node + 1, len(self.tree_tokens)):
            if self.tree_parents[child] == node and self.tree_tokens[child] == token:
                return child
        return None
