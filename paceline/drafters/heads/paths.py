"""States of a session's rows, which move as steps keep and drop rows; and how a step is cut into runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from paceline.engine.interface import StepItem

RowState = TypeVar("RowState")


class RowList(Generic[RowState]):
    """The states of one session's rows, by their index."""

    def __init__(self) -> None:
        self._rows: list[RowState] = []

    def keep(self, item: StepItem) -> None:
        """Keep the rows that a step keeps, in their new places."""
        start = item.base_length - len(item.kept_rows)
        self._rows[start:] = [self._rows[row] for row in item.kept_rows]

    def add(self, state: RowState) -> None:
        """Add the next new row's state."""
        self._rows.append(state)

    def parent(self, item: StepItem, new: int) -> RowState | None:
        """The state of the parent of new row `new`, once the kept rows are in place; None: it has no parent."""
        row = parent_row(item, new)
        return None if row < 0 else self._rows[row]


def parent_row(item: StepItem, new: int) -> int:
    """Index, within the session, of the parent of new row `new`; -1: it has none."""
    return item.trunk + item.parent_of(item.kept_tree + new)


def runs(item: StepItem, reads_parent: Callable[[int], bool]) -> Iterator[StepItem]:
    """The steps that compute a step's new rows, such that no row reads the output of one in the same step.

    `reads_parent(row)`: whether new row `row` reads the output of the row before it.
    """
    first, count = 0, len(item.token_ids)
    for row in range(1, count + 1):
        in_run = row < count and not (reads_parent(row) and parent_row(item, row) >= item.base_length + first)
        if not in_run:
            yield _run(item, first, row)
            first = row


def _run(item: StepItem, first: int, end: int) -> StepItem:
    """New rows [first, end) of a step, behind those before them."""
    return replace(
        item,
        base_length=item.base_length + first,
        token_ids=item.token_ids[first:end],
        parents=item.parents[: item.kept_tree + end],
        kept_rows=item.kept_rows if first == 0 else (),
        logit_rows=tuple(row - first for row in item.logit_rows if first <= row < end),
        trunk_length=item.trunk,
    )
