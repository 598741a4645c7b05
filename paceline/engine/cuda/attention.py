"""Attention of one step over the pages of its sessions, as a function of the step's integers; shapes are fixed.

The library attends here, over copies of the keys; `attention_kernel.py` reads them where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import torch

from paceline.engine.attention import AttentionFacts, packed_attention
from paceline.engine.cuda.buckets import BITS, PAGE_ROWS, GroupShape
from paceline.engine.cuda.layout import GroupFields, Layout, part
from paceline.engine.cuda.pages import PagePool
from paceline.engine.forward import AttentionCall

Group = TypeVar("Group")


@dataclass(frozen=True, eq=False)
class GatheredGroup:
    """Sessions that attend together: their keys are copied next to each other, for attention of the library's."""

    shape: GroupShape
    source: torch.Tensor  # [queries]
    pool_rows: torch.Tensor  # [sessions · length] rows of the pool; the zero row behind a session's last
    masks: tuple[torch.Tensor, ...]  # by kind of layer [sessions, 1, groups · rows, length] additive

    def attend(
        self, kind: int, call: AttentionCall, layer_kv: torch.Tensor
    ) -> torch.Tensor:  # [queries, heads, head_dim]
        """The heads that share keys become rows of one head, which reads each key once."""
        sessions, rows, query = self.shape.sessions, self.shape.rows, call.query[0]
        heads, _, head_dim = query.shape
        kv_heads = layer_kv.shape[2]
        group_size = heads // kv_heads
        queries = query.index_select(1, self.source).view(kv_heads, group_size, sessions, rows, head_dim)
        packed_queries = queries.permute(2, 0, 1, 3, 4).reshape(sessions, kv_heads, group_size * rows, head_dim)
        keys_values = layer_kv.index_select(1, self.pool_rows).view(2, sessions, -1, kv_heads, head_dim)
        keys, values = keys_values.transpose(2, 3)  # each [sessions, kv_heads, length, head_dim]
        attention = packed_attention(call, packed_queries, keys, values, self.masks[kind])
        by_row = attention.view(sessions, kv_heads, group_size, rows, head_dim).permute(0, 3, 1, 2, 4)
        return by_row.reshape(sessions * rows, heads, head_dim)


@dataclass(frozen=True, eq=False)
class PoolAttention(Generic[Group]):
    """What the attention of one step has, whatever computes it: places of new rows, and its groups."""

    pool: torch.Tensor  # [layers, 2, pool rows, kv_heads, head_dim]
    write: torch.Tensor  # [rows]
    query: torch.Tensor  # [rows]
    groups: tuple[Group, ...]
    kind_of_layer: tuple[int, ...]

    @classmethod
    def of(
        cls, inputs: torch.Tensor, layout: Layout, pool: PagePool, groups: Iterable[Group], facts: AttentionFacts
    ) -> Self:
        """The attention of a step by its integers."""
        write, query = part(inputs, layout.write), part(inputs, layout.query)
        return cls(pool.rows, write, query, tuple(groups), facts.kind_of_layer)

    def write_rows(self, call: AttentionCall) -> torch.Tensor:  # [2, pool rows, kv_heads, head_dim]
        """Write a layer's new keys and values to their places; returns the layer's part of the pool."""
        layer_kv = self.pool[call.layer]
        layer_kv[0].index_copy_(0, self.write, call.key[0].transpose(0, 1))
        layer_kv[1].index_copy_(0, self.write, call.value[0].transpose(0, 1))
        return layer_kv


class GatheredAttention(PoolAttention[GatheredGroup]):
    """Each group gathers what its rows see."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention of one layer: [1, rows, heads, head_dim]."""
        layer_kv = self.write_rows(call)
        outputs = [group.attend(self.kind_of_layer[call.layer], call, layer_kv) for group in self.groups]
        attention = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return attention.index_select(0, self.query)[None]


def gathered_attention(
    inputs: torch.Tensor, layout: Layout, shapes: tuple[GroupShape, ...], pool: PagePool, facts: AttentionFacts
) -> GatheredAttention:
    """The attention of a step, as far as all layers share it."""
    dtype = pool.rows.dtype
    groups = (
        GatheredGroup(
            shape,
            part(inputs, fields.source),
            _pool_rows(inputs, fields, shape, pool.zero_row),
            tuple(_mask(inputs, fields, shape, kind, each.groups, dtype) for kind, each in enumerate(facts.kinds)),
        )
        for shape, fields in zip(shapes, layout.groups, strict=True)
    )
    return GatheredAttention.of(inputs, layout, pool, groups, facts)


def _pool_rows(inputs: torch.Tensor, fields: GroupFields, shape: GroupShape, zero_row: int) -> torch.Tensor:
    """[sessions · length]: where the pool has each key of each session."""
    slots = torch.arange(shape.length, device=inputs.device)
    pages = part(inputs, fields.pages)[:, :, None]
    rows = (pages * PAGE_ROWS + slots[:PAGE_ROWS]).flatten(1)  # [sessions, length]
    return rows.masked_fill(slots >= part(inputs, fields.length)[:, None], zero_row).flatten()


def _mask(
    inputs: torch.Tensor, fields: GroupFields, shape: GroupShape, kind: int, heads: int, dtype: torch.dtype
) -> torch.Tensor:
    """[sessions, 1, heads · rows, length]: 0 where a query sees a key, -inf elsewhere."""
    slots = torch.arange(shape.length, device=inputs.device)
    first, end = part(inputs, fields.first)[kind][:, :, None], part(inputs, fields.end)[:, :, None]
    visible = (slots >= first) & (slots < end)  # [sessions, rows, length]
    if shape.words:
        offset = slots - part(inputs, fields.trunk)[:, None]  # [sessions, length]
        inside = (offset >= 0) & (offset < shape.words * BITS)
        word = (offset // BITS).masked_fill(~inside, 0)[:, None, :].expand(visible.shape)
        bits = part(inputs, fields.bits)[kind].gather(2, word) >> (offset % BITS)[:, None, :]
        visible = visible | (inside[:, None, :] & ((bits & 1) == 1))
    mask = torch.zeros(visible.shape, dtype=dtype, device=inputs.device).masked_fill(~visible, float("-inf"))
    return mask[:, None].repeat(1, 1, heads, 1)
