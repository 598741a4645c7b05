"""Keys and values of sessions, whose valid rows are a length.

Rollback is keeping fewer rows; compaction copies a tree's accepted path, or its
live rows, into place. The tensors are as large as what the ledger reserved, so
memory never grows past the budget; on a CPU their pages are taken as they are
first written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

KVRows = tuple[torch.Tensor, ...]
"""Some rows of a session, of each of its tensors: [planes, rows, width]."""


@dataclass(frozen=True)
class LayerShape:
    """The shape of one row in one layer."""

    kv_heads: int
    key_width: int
    value_width: int
    """Other than that of keys in multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    groups: int
    """Query heads that share one key head."""
    index_width: int = 0
    """Of the key by which an index chooses (`paceline.engine.index`); 0: there is none."""

    @property
    def tensors(self) -> tuple[tuple[int, int], ...]:
        """Count and width of keys, values and index keys."""
        kv = (self.kv_heads, self.key_width), (self.kv_heads, self.value_width)
        return (*kv, (1, self.index_width)) if self.index_width else kv


@dataclass(frozen=True)
class Planes:
    """The place of keys, values or index keys: planes [start, end), one a head, of the tensor of this width."""

    width: int
    start: int
    end: int


@dataclass(frozen=True)
class KVShape:
    """The shape of one row in all layers, which may differ."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all layers; 1 where no layer attends, so that rows are counted."""
        widths = sum(count * width for layer in self.layers for count, width in layer.tensors)
        return max(1, widths * self.dtype.itemsize)

    @property
    def heads(self) -> int:
        """Query heads of the layer that has the most."""
        return max((layer.kv_heads * layer.groups for layer in self.layers), default=0)

    @property
    def groups(self) -> int:
        """Query heads that share a key head, in the layer where the most do."""
        return max((layer.groups for layer in self.layers), default=0)

    @property
    def uniform_layer(self) -> LayerShape | None:
        """The shape of every layer, if all are alike and have keys and values of one width alone; otherwise None."""
        if not self.layers:
            return None
        first = self.layers[0]
        is_uniform = first.key_width == first.value_width and not first.index_width
        return first if is_uniform and all(layer == first for layer in self.layers) else None

    @cached_property
    def places(self) -> tuple[tuple[Planes, ...], ...]:
        """Places of each layer's `tensors`, in an order in which uniform layers are [layers, 2, kv_heads]."""
        next_planes: Counter[int] = Counter()
        places = []
        for layer in self.layers:
            planes = []
            for count, width in layer.tensors:
                planes.append(Planes(width, next_planes[width], next_planes[width] + count))
                next_planes[width] += count
            places.append(tuple(planes))
        return tuple(places)


def keep_rows(rows: torch.Tensor, dim: int, base_length: int, kept_rows: Sequence[int]) -> None:
    """Make `kept_rows` the last of the first `base_length` rows of a tensor, whose rows `dim` counts."""
    start = base_length - len(kept_rows)
    if tuple(kept_rows) != tuple(range(start, base_length)):
        index = torch.tensor(kept_rows, device=rows.device)
        # The right-hand side is a copy, so overlapping rows are safe.
        rows.narrow(dim, start, len(kept_rows)).copy_(rows.index_select(dim, index))


class SessionKV:
    """One session's keys and values: one contiguous tensor for each width that they have."""

    def __init__(self, shape: KVShape, max_rows: int) -> None:
        self.capacity = max_rows
        """Rows that fit."""
        planes: dict[int, int] = {}
        for place in (each for layer in shape.places for each in layer):
            planes[place.width] = max(planes.get(place.width, 0), place.end)
        rows = {
            width: torch.empty((count, max_rows, width), dtype=shape.dtype, device=shape.device)
            for width, count in planes.items()
        }
        self._rows: KVRows = tuple(rows.values())
        self._layers = [[rows[each.width][each.start : each.end] for each in layer] for layer in shape.places]
        self._filled_rows = 0

    @property
    def address(self) -> int:
        """Address of [layers, 2, kv_heads, capacity, head_dim] of uniform layers, valid until the session closes."""
        assert len(self._rows) == 1, "uniform layers"
        return self._rows[0].data_ptr()

    def keys(self, layer: int) -> torch.Tensor:
        """[kv_heads, capacity, key_width], to be read and written in place."""
        return self._layers[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        """[kv_heads, capacity, value_width], to be read and written in place."""
        return self._layers[layer][1]

    def index_keys(self, layer: int) -> torch.Tensor:
        """[capacity, index_width] of a layer that has some, to be read and written in place."""
        return self._layers[layer][2][0]

    def keep(self, base_length: int, kept_rows: Sequence[int]) -> None:
        """Keep `base_length` rows, the last of them from `kept_rows`."""
        for rows in self._rows:
            keep_rows(rows, 1, base_length, kept_rows)

    def copy_out(self, start: int, end: int) -> KVRows:
        """A copy of rows [start, end)."""
        return tuple(rows[:, start:end].clone(memory_format=torch.contiguous_format) for rows in self._rows)

    def copy_in(self, start: int, rows: KVRows) -> None:
        """Write rows that `copy_out` returned."""
        end = start + rows[0].shape[1]
        for tensor, new in zip(self._rows, rows, strict=True):
            tensor[:, start:end] = new
        self._filled_rows = max(self._filled_rows, end)

    def fill(self, rows: int) -> None:
        """Make the first `rows` rows finite: rows that were never written become zero.

        Only for sessions that write no row before those that were filled or copied in.
        """
        if rows > self._filled_rows:
            for tensor in self._rows:
                tensor[:, self._filled_rows : rows] = 0
            self._filled_rows = rows
