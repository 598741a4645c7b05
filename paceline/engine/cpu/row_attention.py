"""Attention of few rows of many sessions: one compiled pass over all of them.

Library kernels are made for many queries of one session: a call for each session and layer takes longer to start than
to compute. Here a row takes a dot product, an exponential and a multiply-add per key that it sees, in one loop over
all rows of a step, so keys that a row doesn't see cost nothing and no mask is made. The order of sums depends on the
number of keys alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.attention import Horizon
from paceline.engine.cpu.row_math import ITEM, floats
from paceline.engine.forward import AttentionCall
from paceline.engine.interface import StepItem
from paceline.engine.kv import SessionKV
from paceline.protocol.proposal import ROOT
from paceline.runtime.compiled import compiled
from paceline.sampling.ranking import REORDER, exp

DTYPE = torch.float32
"""The dtype of its arithmetic, of keys and of values."""

FEW_KEYS = 4096
"""Up to this many (row, key) pairs a session with several rows is faster here than in a library's product.

Decided with docs/decisions/2026-11-21-rows-in-compiled-loops.md, which does not record the crossover.
"""
EVERY_KEY = sys.maxsize
"""Whole steps in one compiled loop are faster than layers one by one, however long a prompt or a text is.

Measured in docs/decisions/2026-11-21-a-step-in-one-loop.md.
"""

VisibleKeys = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""`rows`, `starts` and `others` of a `RowAttention`."""

_NO_NAN = REORDER | {"nnan"}

_float = np.float32


def is_few(item: StepItem, few_keys: int) -> bool:
    """Whether an item's rows are better computed here: a single row, or few rows that see few keys.

    `few_keys`: the largest number of (row, key) pairs of such rows; 0: nothing is computed here.
    """
    new = len(item.token_ids)
    return few_keys > 0 if new == 1 else new * (item.base_length + new) <= few_keys


@dataclass(frozen=True)
class RowAttention:
    """The rows of a step that are computed here, and which keys each sees, as compiled code takes them.

    `visible` are `rows`, `starts` and `others`. Each of `rows` [n, 6] holds the row's index in the step, the address
    of its session's keys and values, their capacity, the slot of the row's own key, the first slot that it sees, and
    the number of slots from there on that it sees. Row i also sees the slots `others[starts[i]:starts[i + 1]]`,
    counted from the first slot that it sees.
    """

    visible: VisibleKeys
    scores: NDArray[np.float32]
    """Room for the scores of the row that sees most keys."""

    @classmethod
    def from_items(
        cls, placements: Sequence[tuple[StepItem, SessionKV, int]], horizon: Horizon | None = None
    ) -> RowAttention:
        """The attention of some items of a plan.

        Args:
            placements: each item with its session's rows and the index of its first row in the step.
            horizon: how far back rows see; None: they see all that lies before them.
        """
        rows: list[tuple[int, int, int, int, int, int]] = []
        starts: list[int] = [0]
        others: list[int] = []
        for item, kv, low in placements:
            # Compiled code checks no bounds.
            assert item.base_length + len(item.token_ids) <= kv.capacity
            for index, (first, end, path) in enumerate(_visible_slots(item, horizon)):
                rows.append((low + index, kv.address, kv.capacity, item.base_length + index, first, end - first))
                others.extend(slot - first for slot in path)
                starts.append(len(others))
        most = max((row[5] for row in rows), default=0) + len(others)
        visible = np.array(rows, np.int64), np.array(starts, np.int64), np.array(others, np.int64)
        return cls(visible, np.empty(most, np.float32))

    def attend(self, call: AttentionCall, out: torch.Tensor) -> None:
        """Write the rows' keys and values behind the kept ones, and their attention into `out`.

        `out`: [1, rows, heads, head_dim], contiguous.
        """
        head_dim, kv_heads = call.query.shape[3], call.key.shape[1]
        scale = 1 / math.sqrt(head_dim) if call.scaling is None else call.scaling
        _attend(
            head_dim,
            self.visible,
            call.layer,
            call.query.shape[1],
            kv_heads,
            (_strides(call.query), _strides(call.key), _strides(call.value)),
            out.data_ptr(),
            np.float32(scale),
            self.scores,
        )


def _visible_slots(item: StepItem, horizon: Horizon | None) -> Iterator[tuple[int, int, list[int]]]:
    """For every new row the slots [first, end) that it sees, and the later slots of its path."""
    paths = _paths(item)
    if horizon is None:
        yield from ((0, end, path) for end, path in paths)
        return
    for end, path in paths:
        first = int(horizon[end + len(path) - 1])
        # Slots before `end` are positions; each of the path is a position more.
        yield min(first, end), end, path[max(0, first - end) :]


def _paths(item: StepItem) -> Iterator[tuple[int, list[int]]]:
    """For every new row how many slots from the first on are on its path, and the later slots of the path."""
    if item.is_chain:
        yield from ((item.base_length + row + 1, []) for row in range(len(item.token_ids)))
        return
    for node in range(item.kept_tree, item.tree_rows):
        path = []
        while node != ROOT:
            path.append(item.trunk + node)
            node = item.parent_of(node)
        yield item.trunk, path[::-1]


def _strides(rows: torch.Tensor) -> tuple[int, int, int]:
    """Address of [1, heads, rows, head_dim], elements from row to row and from head to head."""
    assert rows.stride(3) == 1 and rows.dtype == DTYPE
    return rows.data_ptr(), rows.stride(2), rows.stride(1)


@partial(compiled, fastmath=_NO_NAN, inline=True)
def _largest(scores: NDArray[np.float32], count: int) -> np.float32:
    """Largest score; a NaN among them stays one in the exponentials."""
    largest = scores[0]
    for key in range(count):
        largest = max(largest, scores[key])
    return np.float32(largest)


@partial(compiled, fastmath=REORDER, inline=True)
def _dot(first: int, second: int, width: int) -> np.float32:
    one, other = floats(first), floats(second)
    total = _float(0)
    for column in range(width):
        total += one[column] * other[column]
    return total


@partial(compiled, fastmath=REORDER, inline=True)
def _add(out: int, row: int, weight: np.float32, width: int) -> None:
    sums, vector = floats(out), floats(row)
    for column in range(width):
        sums[column] += weight * vector[column]


@partial(compiled, fastmath=REORDER, inline=True)
def _add_four(out: int, row: int, weights: NDArray[np.float32], first: int, width: int) -> None:
    """Four values that follow one another: the sums are loaded and stored once for all."""
    sums, step = floats(out), ITEM * width
    a, b, c, d = floats(row), floats(row + step), floats(row + 2 * step), floats(row + 3 * step)
    for column in range(width):
        sums[column] += (
            weights[first] * a[column]
            + weights[first + 1] * b[column]
            + weights[first + 2] * c[column]
            + weights[first + 3] * d[column]
        )


@partial(compiled, fastmath=REORDER, inline=True)
def _attend_one(
    query: int,
    keys: int,
    values: int,
    out: int,
    first: int,
    others: NDArray[np.int64],
    width: int,
    scale: np.float32,
    scores: NDArray[np.float32],
) -> None:
    """One query head over the first keys and the others; addresses of [head_dim] and [capacity, head_dim]."""
    step, count = ITEM * width, first + others.size
    for key in range(first):
        scores[key] = _dot(query, keys + key * step, width) * scale
    for index in range(others.size):
        scores[first + index] = _dot(query, keys + others[index] * step, width) * scale
    largest = _largest(scores, count)
    for key in range(count):
        scores[key] = exp(scores[key] - largest)
    total, sums = _float(0), floats(out)
    for key in range(count):
        total += scores[key]
    for column in range(width):
        sums[column] = _float(0)
    fours = first // 4 * 4
    for key in range(0, fours, 4):
        _add_four(out, values + key * step, scores, key, width)
    for key in range(fours, first):
        _add(out, values + key * step, scores[key], width)
    for index in range(others.size):
        _add(out, values + others[index] * step, scores[first + index], width)
    for column in range(width):
        sums[column] /= total


@partial(compiled, inline=True)
def _write(rows: NDArray[np.int64], first_head: int, kv_heads: int, width: int, source: tuple[int, int, int]) -> None:
    """Copy the rows' own keys or values to their slots, from a head of the sessions' tensors on."""
    start, from_row, from_head = source
    for index in range(len(rows)):
        row, address, capacity, slot, _, _ = rows[index]
        for head in range(kv_heads):
            destination = floats(address + ITEM * width * ((first_head + head) * capacity + slot))
            new = floats(start + ITEM * (row * from_row + head * from_head))
            for column in range(width):
                destination[column] = new[column]


@compiled
def attend_head(
    visible: VisibleKeys,
    index: int,
    heads: tuple[int, int, int],
    layer: int,
    width: int,
    query: int,
    out: int,
    scale: np.float32,
    scores: NDArray[np.float32],
) -> None:
    """In compiled code: one query head of one of the rows.

    Args:
        seen: the rows, and which keys each sees.
        index: of the row among them.
        heads: which query head, of how many, and how many key heads there are.
        layer: whose keys and values.
        width: head_dim.
        query: address of [head_dim].
        out: address of [head_dim].
        scale: of the scores.
        scores: room for the row's.
    """
    rows, starts, others = visible
    head, query_heads, kv_heads = heads
    _, address, capacity, _, start, first = rows[index]
    path = others[starts[index] : starts[index + 1]]
    keys = address + ITEM * width * (capacity * (layer * 2 * kv_heads + head * kv_heads // query_heads) + start)
    values = keys + ITEM * width * capacity * kv_heads
    # Known widths are faster by a third (docs/decisions/2026-11-21-rows-in-compiled-loops.md).
    if width == 64:
        _attend_one(query, keys, values, out, first, path, 64, scale, scores)
    elif width == 128:
        _attend_one(query, keys, values, out, first, path, 128, scale, scores)
    else:
        _attend_one(query, keys, values, out, first, path, width, scale, scores)


@compiled
def _attend(
    width: int,
    visible: VisibleKeys,
    layer: int,
    heads: int,
    kv_heads: int,
    qkv: tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]],
    out: int,
    scale: np.float32,
    scores: NDArray[np.float32],
) -> None:
    rows = visible[0]
    (query, query_row, query_head), key, value = qkv
    first_head = layer * 2 * kv_heads
    _write(rows, first_head, kv_heads, width, key)
    _write(rows, first_head + kv_heads, kv_heads, width, value)
    for index in range(len(rows)):
        row = rows[index, 0]
        for head in range(heads):
            head_query = query + ITEM * (row * query_row + head * query_head)
            head_out = out + ITEM * width * (row * heads + head)
            attend_head(visible, index, (head, heads, kv_heads), layer, width, head_query, head_out, scale, scores)
