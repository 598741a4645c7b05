"""Attention over pages in two Triton kernels: nothing is gathered, no mask is made, and long sessions are split.

A program of the first attends some rows of one session, of the heads that share one key head, over one part of the
session's keys, which it reads where they lie; by the step's integers it knows which of them each row sees. The second
puts the parts together (flash-decoding; Dao et al., arXiv 2205.14135, section 3.1). How many parts there are depends
on the step's shape alone, what is read on the sessions' lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from itertools import accumulate

import torch
import triton
import triton.language as tl

from paceline.engine.attention import SINKS, SOFTCAP, AttentionFacts
from paceline.engine.cuda.attention import PoolAttention
from paceline.engine.cuda.buckets import BITS, PAGE_ROWS, GroupShape
from paceline.engine.cuda.layout import Layout, part
from paceline.engine.cuda.pages import PagePool
from paceline.engine.forward import AttentionCall

BLOCK_KEYS, BLOCK_BYTES = 128, 1 << 15
"""Keys that a program reads at once, and bytes of them: of 32, 64 and 128 the fastest for chains on an H200, in
bfloat16 at a width of 128. A multiprocessor has room for seven such blocks; the compiler plans with six."""
QUERY_BLOCKS = (16, 32, 64)
"""Query rows of a program: the least of these that holds all rows of a session and key head, or the last."""
PROGRAMS = 264
"""Programs that a layer is divided into, where its keys suffice: two for each multiprocessor of an H100."""
COUNTS = ("rows", "page_count", "tiles", "words", "first_query", "queries", "parts", "row_stride")
"""Arguments whose values make no kernel of their own: one is compiled, in a second or so, for each block and kind."""
INTEGERS = ("source", "pages", "lengths", "trunks", "first", "end", "bits")
"""Addresses in the step's array, whose alignment makes no kernel of its own: it differs from shape to shape."""


@dataclass(frozen=True, eq=False)
class PagedGroup:
    """Sessions that attend together: views of the step's integers, the same in every layer."""

    shape: GroupShape
    first_query: int  # of the queries of all groups
    source: torch.Tensor  # [queries]
    pages: torch.Tensor  # [sessions, pages]
    length: torch.Tensor  # [sessions]
    trunk: torch.Tensor  # [sessions]
    first: torch.Tensor  # [kinds, sessions, rows]
    end: torch.Tensor  # [sessions, rows]
    bits: torch.Tensor  # [kinds, sessions, rows, words]

    def attend(
        self, kind: int, call: AttentionCall, layer_kv: torch.Tensor, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Write the attention of the group's rows to `output` [rows, heads, head_dim]; `query` as in the layout."""
        heads, _, width = call.query.shape[1:]
        kv_heads, shape = layer_kv.shape[2], self.shape
        rows = heads // kv_heads * shape.rows
        block = _query_block(rows)
        tiles = -(-rows // block)
        parts = _parts(shape, kv_heads * tiles)
        queries = call.query[0] if call.query.stride(3) == 1 else call.query[0].contiguous()
        partial = queries.new_empty((parts, shape.queries, heads, width), dtype=torch.float32)
        log_sums = queries.new_empty((parts, shape.queries, heads), dtype=torch.float32)
        block_width = max(16, triton.next_power_of_2(width))
        softcap, sinks = call.extras.get(SOFTCAP), call.extras.get(SINKS)
        integers = (self.source, self.pages, self.length, self.trunk, self.first[kind], self.end, self.bits[kind])
        strides = (*queries.stride()[:2], layer_kv.stride(0))
        scales = (1 / math.sqrt(width) if call.scaling is None else call.scaling, softcap or 0.0)
        sizes = (shape.rows, shape.pages, tiles, shape.words)
        _attend[(shape.sessions * tiles, kv_heads, parts)](
            *(queries, layer_kv, *integers, partial, log_sums, *scales, *strides, *sizes),
            kv_heads=kv_heads,
            group_size=heads // kv_heads,
            width=width,
            has_tree=shape.words > 0,
            has_softcap=softcap is not None,
            page_rows=PAGE_ROWS,
            word_bits=BITS,
            block_rows=block,
            block_keys=min(BLOCK_KEYS, BLOCK_BYTES // (block_width * layer_kv.itemsize)),
            block_width=block_width,
        )
        _combine[(len(output), heads)](
            *(partial, log_sums, log_sums if sinks is None else sinks, query, output),
            *(self.first_query, shape.queries, parts),
            heads=heads,
            width=width,
            has_sinks=sinks is not None,
            block_width=block_width,
        )


class PagedAttention(PoolAttention[PagedGroup]):
    """Each group reads what its rows see where it lies."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention of one layer: [1, rows, heads, head_dim]."""
        layer_kv = self.write_rows(call)
        heads, rows, width = call.query.shape[1:]
        output = call.query.new_empty((rows, heads, width))
        for group in self.groups:
            group.attend(self.kind_of_layer[call.layer], call, layer_kv, self.query, output)
        return output[None]


def paged_attention(
    inputs: torch.Tensor, layout: Layout, shapes: tuple[GroupShape, ...], pool: PagePool, facts: AttentionFacts
) -> PagedAttention:
    """The attention of a step, as far as all layers share it."""
    firsts = accumulate((shape.queries for shape in shapes), initial=0)
    groups = (
        PagedGroup(shape, first, *(part(inputs, getattr(fields, field.name)) for field in dataclass_fields(fields)))
        for shape, fields, first in zip(shapes, layout.groups, firsts, strict=False)
    )
    return PagedAttention.of(inputs, layout, pool, groups, facts)


def _query_block(rows: int) -> int:
    """Query rows of a program, where a session and key head have so many."""
    return next((size for size in QUERY_BLOCKS if size >= rows), QUERY_BLOCKS[-1])


def _parts(shape: GroupShape, programs: int) -> int:
    """Into how many parts keys are divided, where so many programs attend one session's."""
    return max(1, min(-(-PROGRAMS // (shape.sessions * programs)), shape.length // BLOCK_KEYS))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INTEGERS)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # the kernel's arguments are addresses and numbers
    query,  # [heads, rows, width]
    layer_kv,  # [2, pool rows, kv_heads, width]
    source,
    pages,
    lengths,
    trunks,
    first,  # [sessions, rows]
    end,
    bits,  # [sessions, rows, words]
    partial,  # [parts, queries, heads, width]: attention over a part's keys
    log_sums,  # [parts, queries, heads]: the logarithm of the sum of its weights
    scaling,
    softcap,
    head_stride,
    row_stride,
    values_offset,
    rows,
    page_count,
    tiles,
    words,
    kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    width: tl.constexpr,
    has_tree: tl.constexpr,
    has_softcap: tl.constexpr,
    page_rows: tl.constexpr,
    word_bits: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_width: tl.constexpr,
):
    """Some rows of a session and a key head, over one part of the session's keys."""
    session, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    kv_head, own_part = tl.program_id(1), tl.program_id(2)
    place = tile * block_rows + tl.arange(0, block_rows)
    is_row = place < group_size * rows
    row = session * rows + tl.where(is_row, place % rows, 0)  # of the group's queries
    head = kv_head * group_size + tl.where(is_row, place // rows, 0)
    columns = tl.arange(0, block_width)
    is_column = columns < width

    length = tl.load(lengths + session).to(tl.int32)
    own_first = tl.load(first + row, mask=is_row, other=2147483647).to(tl.int32)
    own_end = tl.load(end + row, mask=is_row, other=0).to(tl.int32)
    low, high = tl.min(own_first, axis=0), tl.max(own_end, axis=0)
    if has_tree:
        trunk = tl.load(trunks + session).to(tl.int32)
        low, high = tl.minimum(low, trunk), length
    low, high = low // block_keys * block_keys, tl.minimum(high, length)
    blocks = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), block_keys), tl.num_programs(2))
    start = low + own_part * blocks * block_keys
    stop = tl.minimum(start + blocks * block_keys, high)

    packed_row = tl.load(source + row, mask=is_row, other=0)
    queries = query + head * head_stride + packed_row * row_stride
    own_query = tl.load(queries[:, None] + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
    top = tl.full([block_rows], float("-inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    sums = tl.zeros([block_rows, block_width], tl.float32)
    for block in range(start, stop, block_keys):
        slots = block + tl.arange(0, block_keys)
        is_held = slots < length
        page = tl.load(pages + session * page_count + slots // page_rows, mask=is_held, other=0)
        places = (page * page_rows + slots % page_rows) * (kv_heads * width) + kv_head * width
        keys = tl.load(
            layer_kv + places[None, :] + columns[:, None], mask=is_held[None, :] & is_column[:, None], other=0.0
        )
        scores = tl.dot(own_query, keys, input_precision="ieee") * scaling
        if has_softcap:
            # tanh by the logistic function
            scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * softcap
        visible = (slots[None, :] >= own_first[:, None]) & (slots[None, :] < own_end[:, None])
        if has_tree:
            offset = slots - trunk
            inside = (offset >= 0) & (offset < words * word_bits)
            word = tl.where(inside, offset // word_bits, 0)
            seen = tl.load(
                bits + row[:, None] * words + word[None, :], mask=is_row[:, None] & inside[None, :], other=0
            )
            visible = visible | (((seen >> (offset % word_bits)[None, :]) & 1) == 1) & inside[None, :]
        scores = tl.where(visible & is_held[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        values = tl.load(
            layer_kv + values_offset + places[:, None] + columns[None, :],
            mask=is_held[:, None] & is_column[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new_top
    queries_of_part = tl.num_programs(0) // tiles * rows
    out = (own_part * queries_of_part + row) * (kv_heads * group_size) + head
    divisor = tl.where(total == 0, 1.0, total)
    tl.store(
        partial + out[:, None].to(tl.int64) * width + columns[None, :],
        sums / divisor[:, None],
        mask=is_row[:, None] & is_column[None, :],
    )
    tl.store(log_sums + out, tl.where(total == 0, float("-inf"), top + tl.log(divisor)), mask=is_row)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=("query",))  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    partial,
    log_sums,
    sinks,
    query,  # [rows]
    output,  # [rows, heads, width]
    first_query,
    queries,
    parts,
    heads: tl.constexpr,
    width: tl.constexpr,
    has_sinks: tl.constexpr,
    block_width: tl.constexpr,
):
    """The parts of one row and head, each by its share of the softmax; a sink has a share and no value."""
    row, head = tl.program_id(0), tl.program_id(1)
    own_query = tl.load(query + row).to(tl.int32) - first_query
    if (own_query >= 0) & (own_query < queries):  # of this group
        columns = tl.arange(0, block_width)
        top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        if has_sinks:
            top, total = tl.load(sinks + head).to(tl.float32), tl.full([], 1.0, tl.float32)
        sums = tl.zeros([block_width], tl.float32)
        for each in range(parts):
            place = ((each * queries + own_query) * heads + head).to(tl.int64)
            log_sum = tl.load(log_sums + place)
            new_top = tl.maximum(top, log_sum)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink, weight = tl.exp(top - base), tl.exp(log_sum - base)
            values = tl.load(partial + place * width + columns, mask=columns < width, other=0.0)
            total, sums, top = total * shrink + weight, sums * shrink + values * weight, new_top
        place = (row * heads + head).to(tl.int64)
        tl.store(output + place * width + columns, sums / tl.where(total == 0, 1.0, total), mask=columns < width)
