"""The shapes that a step may have. Pure.

A graph serves one shape, so shapes are few: counts are rounded up to powers of two, KV lengths to half steps between
them (at most a third is padding). Sessions attend in groups of one shape; a group's padded length times its sessions
is what attention reads where it gathers, so sessions of very different lengths don't share one. The limits below are
chosen, not tuned (docs/decisions/2026-11-21-a-gpu-names-candidates.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.blocks import BLOCK_ROWS
from paceline.engine.interface import StepItem

PAGE_ROWS = BLOCK_ROWS
"""Rows of a page; a shared block lies in one."""
MIN_LENGTH = 128
"""The least padded KV length."""
FEW_ROWS = 64
"""New rows of a session up to which a step is bound by launches and memory, and worth a graph."""
GATHERED_ROWS = 1 << 16
"""Most KV rows that a group gathers, unless one session alone has more."""
SKEW = 4
"""A session joins no group whose length is this many times its own."""
BITS = 64
"""Rows of a tree that one word of a mask covers."""
LEAST_CANDIDATES = 7
"""Candidates of a raced row beyond the number of tokens that its caller needs."""
COMMON_SESSIONS, COMMON_LENGTH, COMMON_ROWS = 16, 2048, (1, 8)
"""Most sessions and keys of the steps whose graphs are captured at the start, and their rows: a token, or a round."""
TREE_ROWS = (2, 4, 8, 16, 32, 64)
"""Rows of one session's trees that are captured as well, so that every kernel has been compiled by then."""


def count_bucket(count: int) -> int:
    """The least power of two that is not smaller; 0 for none."""
    return 1 << (count - 1).bit_length() if count else 0


def length_bucket(rows: int) -> int:
    """The padded KV length of so many rows: 128, 192, 256, 384, 512, …"""
    whole = max(MIN_LENGTH, count_bucket(rows))
    shorter = whole // 4 * 3
    return shorter if rows <= shorter and shorter > MIN_LENGTH else whole


@dataclass(frozen=True)
class GroupShape:
    """Sessions that attend together: `sessions` · `rows` queries, each session's over `length` keys.

    `words`: of the mask within a tree, 64 rows each; 0 where every row sees all that lies before it.
    """

    sessions: int
    rows: int
    length: int
    words: int

    @property
    def queries(self) -> int:
        """Query rows, padding included."""
        return self.sessions * self.rows

    @property
    def pages(self) -> int:
        """Pages of one session."""
        return self.length // PAGE_ROWS


@dataclass(frozen=True)
class StepShape:
    """All that a graph depends on.

    Attributes:
        rows: new rows, padding included, as all counts here.
        groups: sessions that attend together.
        raced_rows: rows whose tokens are raced on the device.
        plain_rows: rows whose logits are returned.
        candidates: ids that each raced row returns.
        kinds: kinds of layers, which differ in how far back their rows see.
        feature_layers: layers whose hidden states are returned, ascending. Each such set has a graph of its own, so
            steps without features copy nothing.
        has_filters: whether any raced row has filters: then all of them return what those need.
    """

    rows: int
    groups: tuple[GroupShape, ...]
    raced_rows: int
    plain_rows: int
    candidates: int
    kinds: int = 1
    feature_layers: tuple[int, ...] = ()
    has_filters: bool = False

    @property
    def row_numbers(self) -> int:
        """Numbers that each raced row returns."""
        return 2 + (4 if self.has_filters else 3) * self.candidates

    @property
    def logit_rows(self) -> int:
        """Rows with logits."""
        return self.raced_rows + self.plain_rows

    @property
    def states(self) -> int:
        """Hidden states that are returned, of all rows and feature layers."""
        return self.rows * len(self.feature_layers)

    @property
    def uses_graph(self) -> bool:
        """Whether a graph is worth its memory: longer chunks are bound by arithmetic, and come in many shapes."""
        return all(group.rows <= FEW_ROWS for group in self.groups)


def common_shapes(
    max_sessions: int, max_length: int, vocab_size: int, kinds: int, *, with_race: bool = True
) -> tuple[StepShape, ...]:
    """Shapes of steps in which every session has as many rows, largest first, so that later ones fit their memory.

    `with_race`: whether rows are drawn where they are computed; if not, their logits are returned.
    """
    lengths = sorted({length_bucket(rows) for rows in range(1, min(max_length, COMMON_LENGTH) + 1, MIN_LENGTH // 2)})
    sessions = [1 << power for power in range(count_bucket(min(max_sessions, COMMON_SESSIONS)).bit_length())]
    groups = [GroupShape(each, rows, length, 0) for each in sessions for rows in COMMON_ROWS for length in lengths]
    groups += [GroupShape(1, rows, MIN_LENGTH, 1) for rows in TREE_ROWS]
    groups.sort(key=lambda group: (group.queries, group.sessions * group.length), reverse=True)
    count = candidate_count(1, vocab_size) if with_race else 0
    rows = [(group.queries, 0) if with_race else (0, group.queries) for group in groups]
    return tuple(
        StepShape(sum(each), (group,), *each, count, kinds) for group, each in zip(groups, rows, strict=True)
    )


def candidate_count(tokens: int, vocab_size: int) -> int:
    """Ids that the device returns of a row, where the caller needs the best `tokens`."""
    return min(count_bucket(tokens + LEAST_CANDIDATES), vocab_size)


@dataclass(frozen=True)
class SessionGroup:
    """Items of a plan that attend together, by index."""

    shape: GroupShape
    items: tuple[int, ...]


def groups_of(items: Sequence[StepItem], gathered_rows: int = GATHERED_ROWS) -> tuple[SessionGroup, ...]:
    """Divide the items of a step: few new rows from many, and short sessions from long ones.

    `gathered_rows`: the most of several sessions in one group.
    """
    few = [i for i, item in enumerate(items) if len(item.token_ids) <= FEW_ROWS]
    many = [i for i, item in enumerate(items) if len(item.token_ids) > FEW_ROWS]
    return tuple(_group(items, part) for indices in (few, many) for part in _by_length(items, indices, gathered_rows))


def mask_words(item: StepItem) -> int:
    """Words of a row's mask within the item's tree."""
    return 0 if item.is_chain else -(-item.tree_rows // BITS)


def _length(item: StepItem) -> int:
    return length_bucket(item.base_length + len(item.token_ids))


def _by_length(items: Sequence[StepItem], indices: Sequence[int], gathered_rows: int) -> list[list[int]]:
    parts: list[list[int]] = []
    longest = 0  # of the last part
    lengths = {index: _length(items[index]) for index in indices}
    for index in sorted(indices, key=lambda i: -lengths[i]):
        part = parts[-1] if parts else []
        if part and lengths[index] * SKEW > longest and count_bucket(len(part) + 1) * longest <= gathered_rows:
            part.append(index)
        else:
            parts.append([index])
            longest = lengths[index]
    return parts


def _group(items: Sequence[StepItem], indices: Sequence[int]) -> SessionGroup:
    members = [items[i] for i in indices]
    return SessionGroup(
        GroupShape(
            sessions=count_bucket(len(members)),
            rows=count_bucket(max(len(item.token_ids) for item in members)),
            length=max(_length(item) for item in members),
            words=count_bucket(max(mask_words(item) for item in members)),
        ),
        tuple(sorted(indices)),
    )
