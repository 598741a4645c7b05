"""All KV rows of an engine in one tensor, handed out in pages.

The tensor never moves, so graphs can read and write it. Sessions hold the pages of all rows that they reserved;
a shared block is a page of its own, copied in and out, so that what is evicted takes nothing from anyone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.cuda.buckets import PAGE_ROWS
from paceline.engine.cuda.graphs import upload
from paceline.engine.kv import KVShape

Ids = NDArray[np.int64]


def whole_pages(rows: int) -> int:
    """Rows of the pages that hold so many rows."""
    return -(-rows // PAGE_ROWS) * PAGE_ROWS


class PagePool:
    """Pages of KV rows: free ones, those of sessions, and those of shared blocks.

    One page beyond the budget belongs to nobody: padding reads its first row, which is zero for good (a masked key
    must be finite, since 0 · NaN is NaN), and writes its second.
    """

    def __init__(self, shape: KVShape, rows: int) -> None:
        """Take `rows`, whole pages."""
        assert rows % PAGE_ROWS == 0, "whole pages"
        self._shape = shape
        self.pages = rows // PAGE_ROWS
        layer = shape.uniform_layer
        assert layer is not None, "layers that are alike"
        size = (len(shape.layers), 2, (self.pages + 1) * PAGE_ROWS, layer.kv_heads, layer.key_width)
        self.rows = torch.empty(size, dtype=shape.dtype, device=shape.device)
        """[layers, 2, rows, kv_heads, head_dim]"""
        self.rows[:, :, rows:] = 0
        self._free: list[int] = [*range(self.pages - 1, -1, -1)]
        self._slots: dict[int, int] = {}
        self._free_slots: list[int] = []
        self._counts: list[int] = []
        self._table = np.empty((0, 0), np.int64)
        """[slots, pages]: those of each session in the order of its rows, then the page that belongs to nobody."""

    @property
    def zero_row(self) -> int:
        """A row that is never written."""
        return self.pages * PAGE_ROWS

    @property
    def scratch_row(self) -> int:
        """A row that is never read."""
        return self.zero_row + 1

    def open(self, session: int, rows: int) -> None:
        """Give a session the pages of `rows` rows; the ledger guarantees that enough are free."""
        count = whole_pages(rows) // PAGE_ROWS
        if not self._free_slots or count > self._table.shape[1]:
            self._grow_table(count)
        slot = self._slots[session] = self._free_slots.pop()
        self._counts[slot] = count
        self._table[slot, :count] = [self._free.pop() for _ in range(count)]

    def close(self, session: int) -> None:
        """Take a session's pages back; unknown sessions are ignored."""
        slot = self._slots.pop(session, None)
        if slot is not None:
            self._free.extend(self._table[slot, : self._counts[slot]].tolist())
            self._table[slot] = self.pages
            self._free_slots.append(slot)

    def slots_of(self, sessions: Sequence[int]) -> Ids:
        """The slots of open sessions, by which pages and rows of many are looked up at once."""
        return np.array([self._slots[session] for session in sessions])

    def pages_of(self, slots: Ids, most: int) -> Ids:
        """The first pages of sessions [n, at most `most`] in the order of their rows, nobody's behind the last."""
        return self._table[slots, :most]

    def rows_of(self, slots: Ids, rows: Ids) -> Ids:
        """The pool's rows of rows [n] of sessions, whose slots [n] are given."""
        return self._table[slots, rows // PAGE_ROWS] * PAGE_ROWS + rows % PAGE_ROWS

    def keep(self, sessions: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Make kept rows contiguous, for all sessions of a step at once.

        Args:
            sessions: of each its number, the number of rows that it keeps, and those that become the last of them.
        """
        moves = [
            (self._slots[session], row, place)
            for session, base_length, kept_rows in sessions
            for place, row in enumerate(kept_rows, base_length - len(kept_rows))
            if row != place
        ]
        if moves:
            slots, *places = np.array(moves).T
            both = np.stack([self.rows_of(slots, each) for each in places])
            sources, targets = upload(both, self._shape.device)
            rows = self.rows.view(-1, *self.rows.shape[2:])
            # `index_select` makes a copy, so overlapping rows are safe.
            rows.index_copy_(1, targets, rows.index_select(1, sources))

    def copy_out(self, session: int, start: int) -> int:
        """Copy the page that begins with row `start` to a page of its own; returns that page."""
        page: int = self._free.pop()
        source = int(self._table[self._slots[session], start // PAGE_ROWS])
        rows = self._by_page()
        rows[:, :, page] = rows[:, :, source]
        return page

    def copy_in(self, session: int, pages: Sequence[int]) -> None:
        """Begin a session with the contents of these pages.

        They may have been evicted just now and given to this session: a layer is read whole before it is written.
        """
        if not pages:
            return
        places = np.stack((np.array(pages, np.int64), self._table[self._slots[session], : len(pages)]))
        sources, targets = upload(places, self._shape.device)
        for layer in self._by_page():
            layer.index_copy_(1, targets, layer.index_select(1, sources))

    def release(self, page: int) -> None:
        """Take a block's page back."""
        self._free.append(page)

    def _by_page(self) -> torch.Tensor:
        """[layers, 2, pages, PAGE_ROWS, kv_heads, head_dim]"""
        layers, two, rows, *inner = self.rows.shape
        return self.rows.view(layers, two, rows // PAGE_ROWS, PAGE_ROWS, *inner)

    def _grow_table(self, width: int) -> None:
        """Make room for another session, of at least `width` pages."""
        slots, pages = self._table.shape
        more = 0 if self._free_slots else max(slots, 1)
        size = (slots + more, pages if width <= pages else max(width, 2 * pages))
        table = np.full(size, self.pages, np.int64)
        table[:slots, :pages] = self._table
        self._table = table
        self._counts += [0] * more
        self._free_slots += range(slots, slots + more)
