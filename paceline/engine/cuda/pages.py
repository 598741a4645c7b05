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
        self._session_pages: dict[int, Ids] = {}

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
        self._session_pages[session] = np.array([self._free.pop() for _ in range(count)], np.int64)

    def close(self, session: int) -> None:
        """Take a session's pages back; unknown sessions are ignored."""
        pages = self._session_pages.pop(session, None)
        if pages is not None:
            self._free.extend(pages.tolist())

    def pages_of(self, session: int) -> Ids:
        """A session's pages, in the order of its rows."""
        return self._session_pages[session]

    def rows_of(self, session: int, rows: Ids) -> Ids:
        """The pool's rows of some rows of a session."""
        return self._session_pages[session][rows // PAGE_ROWS] * PAGE_ROWS + rows % PAGE_ROWS

    def keep(self, sessions: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Make kept rows contiguous, for all sessions of a step at once.

        Args:
            sessions: of each its number, the number of rows that it keeps, and those that become the last of them.
        """
        moves = np.concatenate([np.empty((0, 2), np.int64), *(self._moves(*each) for each in sessions)])
        if len(moves):
            sources, targets = upload(np.ascontiguousarray(moves.T), self._shape.device)
            rows = self.rows.view(-1, *self.rows.shape[2:])
            # `index_select` makes a copy, so overlapping rows are safe.
            rows.index_copy_(1, targets, rows.index_select(1, sources))

    def copy_out(self, session: int, start: int) -> int:
        """Copy the page that begins with row `start` to a page of its own; returns that page."""
        page: int = self._free.pop()
        source = int(self._session_pages[session][start // PAGE_ROWS])
        rows = self._by_page()
        rows[:, :, page] = rows[:, :, source]
        return page

    def copy_in(self, session: int, pages: Sequence[int]) -> None:
        """Begin a session with the contents of these pages.

        They may have been evicted just now and given to this session: a layer is read whole before it is written.
        """
        if not pages:
            return
        places = np.stack((np.array(pages, np.int64), self._session_pages[session][: len(pages)]))
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

    def _moves(self, session: int, base_length: int, kept_rows: Sequence[int]) -> Ids:
        """[n, 2]: from and to, of those that are not in place."""
        start = base_length - len(kept_rows)
        rows = np.array([(row, place) for place, row in enumerate(kept_rows, start) if row != place], np.int64)
        return np.stack([self.rows_of(session, each) for each in rows.reshape(-1, 2).T], axis=1)
