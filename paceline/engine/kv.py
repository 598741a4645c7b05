"""Keys and values of sessions: one contiguous tensor each, whose valid rows are a length.

Rollback is keeping fewer rows; compaction copies a tree's accepted path, or its
live rows, into place. Memory follows use: a session's tensor grows in steps up to what the
ledger reserved for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GROWTH_ROWS = 128
"""Smallest growth; longer sessions grow by a quarter, so copying stays a small share."""


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
        self._shape = shape
        self._max_rows = max_rows
        self._rows = self._allocate(min(GROWTH_ROWS, max_rows))  # [layers, 2, kv_heads, capacity, head_dim]

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return self._rows.shape[3]

    def keys_and_values(self, layer: int) -> torch.Tensor:
        """[2, kv_heads, capacity, head_dim], to be read and written in place; valid until it grows."""
        return self._rows[layer]

    def prepare(self, base_length: int, kept_rows: Sequence[int], new_rows: int) -> None:
        """Keep `base_length` rows, the last of them from `kept_rows`, and make room for new ones."""
        start = base_length - len(kept_rows)
        if tuple(kept_rows) != tuple(range(start, base_length)):
            index = torch.tensor(kept_rows, device=self._shape.device)
            # The right-hand side is a copy, so overlapping rows are safe.
            self._rows[:, :, :, start:base_length] = self._rows.index_select(3, index)
        if base_length + new_rows > self.capacity:
            self._grow(base_length, base_length + new_rows)

    def _grow(self, used: int, needed: int) -> None:
        step = max(GROWTH_ROWS, self.capacity // 4)
        grown = self._allocate(min(self._max_rows, max(needed, self.capacity + step)))
        grown[:, :, :, :used] = self._rows[:, :, :, :used]
        self._rows = grown

    def _allocate(self, capacity: int) -> torch.Tensor:
        shape = self._shape
        size = (shape.layers, 2, shape.kv_heads, capacity, shape.head_dim)
        return torch.empty(size, dtype=shape.dtype, device=shape.device)
