"""Keys and values of sessions: one contiguous tensor each, whose valid rows are a length.

Rollback is keeping fewer rows; compaction copies a tree's accepted path, or its
live rows, into place. The tensor is as large as what the ledger reserved, so
memory never grows past the budget; on a CPU its pages are taken as they are
first written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVShape:
    """What one row holds; keys and values have the same shape in every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    groups: int
    """Query heads that share one key head."""
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all layers, keys and values."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class SessionKV:
    """One session's keys and values."""

    def __init__(self, shape: KVShape, max_rows: int) -> None:
        size = (shape.layers, 2, shape.kv_heads, max_rows, shape.head_dim)
        self._rows = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self._filled = 0

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self._rows.shape[3]

    @property
    def address(self) -> int:
        """Where [layers, 2, kv_heads, capacity, head_dim] lies, contiguous, until the session closes."""
        return self._rows.data_ptr()

    def keys_and_values(self, layer: int) -> torch.Tensor:
        """[2, kv_heads, capacity, head_dim], to be read and written in place."""
        return self._rows[layer]

    def keep(self, base_length: int, kept_rows: Sequence[int]) -> None:
        """Keep `base_length` rows, the last of them from `kept_rows`."""
        start = base_length - len(kept_rows)
        if tuple(kept_rows) != tuple(range(start, base_length)):
            index = torch.tensor(kept_rows, device=self._rows.device)
            # The right-hand side is a copy, so overlapping rows are safe.
            self._rows[:, :, :, start:base_length] = self._rows.index_select(3, index)

    def copy_out(self, start: int, end: int) -> torch.Tensor:
        """A copy of rows [start, end): [layers, 2, kv_heads, end - start, head_dim]."""
        return self._rows[:, :, :, start:end].clone(memory_format=torch.contiguous_format)

    def copy_in(self, start: int, rows: torch.Tensor) -> None:
        """Write what `copy_out` gave."""
        end = start + rows.shape[3]
        self._rows[:, :, :, start:end] = rows
        self._filled = max(self._filled, end)

    def fill(self, rows: int) -> None:
        """Make every one of the first `rows` rows finite: what was never written becomes zero.

        Only for sessions whose rows are written behind what was filled or copied in.
        """
        if rows > self._filled:
            self._rows[:, :, :, self._filled : rows] = 0
            self._filled = rows
