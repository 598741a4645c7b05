"""The phases of a compiled decoder step: norms, products and attention, piece by piece."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.engine.cpu.row_attention import VisibleKeys, attend_head
from paceline.engine.cpu.row_math import ITEM, floats, gate_row, norm_row, turn_row
from paceline.engine.cpu.row_products import (
    PIECE,
    Kernel,
    begin,
    multiply,
    multiply_piece,
    panel_bytes,
    panels_of,
    pieces,
    product,
)
from paceline.engine.cpu.thread_pool import finish, take, wait
from paceline.engine.cpu.tiles import LANES
from paceline.runtime.compiled import compiled

PHASES_OF_LAYER = 6
_INPUT_NORM, _QKV, _QKV_BIAS, _OUT, _MLP_NORM, _GATE_UP, _GATE_UP_BIAS, _DOWN = range(8)
"""Columns of the layers' addresses."""


class DecoderShape(NamedTuple):
    """The shape of a decoder, in compiled code."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    scale: np.float32


class SharedBuffers(NamedTuple):
    """Addresses of what all threads read and write, in compiled code."""

    hidden: int  # [rows, width]
    qkv: int  # [rows, (heads + 2 · kv_heads) · head_dim]: queries, keys, values
    attention: int  # [rows, heads · head_dim]
    activations: int  # [rows, inner]
    logits: int  # [logit rows, outputs]
    cosines: int  # [rows, head_dim]
    sines: int  # [rows, head_dim]


class ThreadBuffers(NamedTuple):
    """A thread's own buffers, in compiled code."""

    norm_rows: int  # address of [rows, width]
    gates: int  # address of [2, rows, PIECE]
    scores: NDArray[np.float32]


_Norm = tuple[int, float]
"""Address of its weight, and epsilon."""


@compiled
def decode_step(
    counters: NDArray[np.int64],
    kernel: Kernel,
    shape: DecoderShape,
    layers: NDArray[np.int64],
    epsilons: NDArray[np.float64],
    head: tuple[int, tuple[int, int], int],
    visible: VisibleKeys,
    row_indices: tuple[NDArray[np.int64], NDArray[np.int64]],
    copies: NDArray[np.int64],
    buffers: SharedBuffers,
    scratch: ThreadBuffers,
) -> None:
    """All phases of a step. `row_indices` are those of all rows, and those of the rows that have logits.

    `copies` are addresses to which the layers' inputs are copied, 0: nowhere.
    """
    all_rows, logit_rows = row_indices
    rows, attention_width = len(all_rows), shape.heads * shape.head_dim
    qkv_width = attention_width + 2 * shape.kv_heads * shape.head_dim
    phase = 0
    for layer in range(len(layers)):
        columns = layers[layer]
        norm, weights = (columns[_INPUT_NORM], epsilons[2 * layer]), (columns[_QKV], columns[_QKV_BIAS])
        destination = (buffers.qkv, qkv_width)
        _norm_product(counters, phase, kernel, shape, norm, all_rows, weights, buffers, destination, scratch, False)
        _place(counters, phase + 1, shape, layer, visible[0], copies[layer], buffers)
        _attend(counters, phase + 2, shape, layer, visible, buffers, scratch)
        source, hidden = (buffers.attention, rows, attention_width), (buffers.hidden, shape.width)
        product(counters, phase + 3, kernel, (columns[_OUT], 0), source, hidden, True)
        norm, weights = (columns[_MLP_NORM], epsilons[2 * layer + 1]), (columns[_GATE_UP], columns[_GATE_UP_BIAS])
        destination = (buffers.activations, shape.inner)
        _norm_product(
            counters, phase + 4, kernel, shape, norm, all_rows, weights, buffers, destination, scratch, True
        )
        source = (buffers.activations, rows, shape.inner)
        product(counters, phase + 5, kernel, (columns[_DOWN], 0), source, hidden, True)
        phase += PHASES_OF_LAYER
    weight, addresses, outputs = head
    norm, destination = (weight, epsilons[-1]), (buffers.logits, outputs)
    _norm_product(counters, phase, kernel, shape, norm, logit_rows, addresses, buffers, destination, scratch, False)


@partial(compiled, inline=True)
def _norm(shape: DecoderShape, norm: _Norm, row_indices: NDArray[np.int64], hidden: int, out: int) -> None:
    """RMS norm of some rows. Every thread computes it for itself, which takes less time than waiting for another."""
    weight, epsilon = norm
    row_bytes = shape.width * ITEM
    for index in range(len(row_indices)):
        norm_row(hidden + row_indices[index] * row_bytes, weight, out + index * row_bytes, shape.width, epsilon)


@compiled
def _norm_product(
    counters: NDArray[np.int64],
    phase: int,
    kernel: Kernel,
    shape: DecoderShape,
    norm: _Norm,
    row_indices: NDArray[np.int64],
    addresses: tuple[int, int],
    buffers: SharedBuffers,
    destination: tuple[int, int],
    scratch: ThreadBuffers,
    gates: bool,
) -> None:
    """Norm some hidden rows and multiply them by weights, or by gate and up; a piece of those is outputs of both."""
    last, is_normed = pieces(destination[1]), False
    piece = take(counters, phase)
    while piece < last:
        if not is_normed:
            _norm(shape, norm, row_indices, buffers.hidden, scratch.norm_rows)
            is_normed = True
        if gates:
            _gate_piece(piece, kernel, shape, addresses, len(row_indices), destination[0], scratch)
        else:
            source = (scratch.norm_rows, len(row_indices), shape.width)
            multiply_piece(piece, kernel, addresses, source, destination, False)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, last)


@compiled
def _gate_piece(
    piece: int,
    kernel: Kernel,
    shape: DecoderShape,
    addresses: tuple[int, int],
    rows: int,
    out: int,
    scratch: ThreadBuffers,
) -> None:
    weights, bias = addresses
    first, count = panels_of(piece, shape.inner)
    step, row_bytes = PIECE * ITEM, shape.width * ITEM
    for half in range(2):
        panel, sums = half * shape.inner // LANES + first, scratch.gates + half * rows * step
        begin(sums, step, bias + panel * LANES * ITEM if bias else 0, rows, count * LANES)
        source = weights + panel * panel_bytes(shape.width, kernel.item)
        multiply(
            kernel.address, kernel.item, source, shape.width, scratch.norm_rows, row_bytes, sums, step, rows, count
        )
    for row in range(rows):
        gate, row_out = scratch.gates + row * step, out + (row * shape.inner + first * LANES) * ITEM
        gate_row(gate, gate + rows * step, row_out, count * LANES)


@compiled
def _place(
    counters: NDArray[np.int64],
    phase: int,
    shape: DecoderShape,
    layer: int,
    rows: NDArray[np.int64],
    copy_address: int,
    buffers: SharedBuffers,
) -> None:
    """Rotate queries and keys, and write keys and values to their sessions' slots; a piece is a row.

    The layer's input is copied in this phase, since every thread has read it and none has added to it yet.
    """
    heads, kv_heads, head_bytes = shape.heads, shape.kv_heads, shape.head_dim * ITEM
    piece = take(counters, phase)
    while piece < len(rows):
        row, address, capacity, slot, _, _ = rows[piece]
        start, angle = buffers.qkv + row * (heads + 2 * kv_heads) * head_bytes, row * head_bytes
        turn_row(start, buffers.cosines + angle, buffers.sines + angle, heads + kv_heads, shape.head_dim)
        for head in range(2 * kv_heads):
            destination = floats(address + head_bytes * ((layer * 2 * kv_heads + head) * capacity + slot))
            new = floats(start + (heads + head) * head_bytes)
            for column in range(shape.head_dim):
                destination[column] = new[column]
        if copy_address:
            offset = row * shape.width * ITEM
            source, copy = floats(buffers.hidden + offset), floats(copy_address + offset)
            for column in range(shape.width):
                copy[column] = source[column]
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, len(rows))


@compiled
def _attend(
    counters: NDArray[np.int64],
    phase: int,
    shape: DecoderShape,
    layer: int,
    visible: VisibleKeys,
    buffers: SharedBuffers,
    scratch: ThreadBuffers,
) -> None:
    """Attention; a piece is a query head of a row."""
    rows, heads, head_bytes = visible[0], shape.heads, shape.head_dim * ITEM
    last, row_heads = len(rows) * heads, heads + 2 * shape.kv_heads
    piece = take(counters, phase)
    while piece < last:
        index, head = piece // heads, piece % heads
        row = rows[index, 0]
        query = buffers.qkv + head_bytes * (row * row_heads + head)
        out = buffers.attention + head_bytes * (row * heads + head)
        head_counts = (head, heads, shape.kv_heads)
        attend_head(visible, index, head_counts, layer, shape.head_dim, query, out, shape.scale, scratch.scores)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, last)
