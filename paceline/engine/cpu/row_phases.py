"""The phases of a compiled decoder step: norms, products and attention, piece by piece."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.engine.cpu.row_attention import Seen, attend_head
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
    """Of a decoder, in compiled code."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    scale: np.float32


class SharedRoom(NamedTuple):
    """Addresses of what all threads read and write, in compiled code."""

    hidden: int  # [rows, width]
    joined: int  # [rows, (heads + 2 · kv_heads) · head_dim]: queries, keys, values
    attended: int  # [rows, heads · head_dim]
    gated: int  # [rows, inner]
    logits: int  # [wanted, outputs]
    cosines: int  # [rows, head_dim]
    sines: int  # [rows, head_dim]


class OwnRoom(NamedTuple):
    """What a thread has for itself, in compiled code."""

    normed: int  # address of [rows, width]
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
    seen: Seen,
    which: tuple[NDArray[np.int64], NDArray[np.int64]],
    copies: NDArray[np.int64],
    shared: SharedRoom,
    own: OwnRoom,
) -> None:
    """All phases of a step. `which` are the indices of all rows and of those whose logits are wanted.

    `copies` are addresses to which the layers' inputs are copied, 0: nowhere.
    """
    every, wanted = which
    rows, attended = len(every), shape.heads * shape.head_dim
    joined = attended + 2 * shape.kv_heads * shape.head_dim
    phase = 0
    for layer in range(len(layers)):
        of = layers[layer]
        norm, weights = (of[_INPUT_NORM], epsilons[2 * layer]), (of[_QKV], of[_QKV_BIAS])
        written = (shared.joined, joined)
        _normed_product(counters, phase, kernel, shape, norm, every, weights, shared, written, own, False)
        _place(counters, phase + 1, shape, layer, seen[0], copies[layer], shared)
        _attend(counters, phase + 2, shape, layer, seen, shared, own)
        read, hidden = (shared.attended, rows, attended), (shared.hidden, shape.width)
        product(counters, phase + 3, kernel, (of[_OUT], 0), read, hidden, True)
        norm, weights = (of[_MLP_NORM], epsilons[2 * layer + 1]), (of[_GATE_UP], of[_GATE_UP_BIAS])
        written = (shared.gated, shape.inner)
        _normed_product(counters, phase + 4, kernel, shape, norm, every, weights, shared, written, own, True)
        read = (shared.gated, rows, shape.inner)
        product(counters, phase + 5, kernel, (of[_DOWN], 0), read, hidden, True)
        phase += PHASES_OF_LAYER
    weight, addresses, outputs = head
    norm, written = (weight, epsilons[-1]), (shared.logits, outputs)
    _normed_product(counters, phase, kernel, shape, norm, wanted, addresses, shared, written, own, False)


@partial(compiled, inlined=True)
def _norm(shape: DecoderShape, norm: _Norm, which: NDArray[np.int64], hidden: int, normed: int) -> None:
    """Every thread does this for itself: it takes less than to wait for another to do it."""
    weight, epsilon = norm
    row_bytes = shape.width * ITEM
    for index in range(len(which)):
        norm_row(hidden + which[index] * row_bytes, weight, normed + index * row_bytes, shape.width, epsilon)


@compiled
def _normed_product(
    counters: NDArray[np.int64],
    phase: int,
    kernel: Kernel,
    shape: DecoderShape,
    norm: _Norm,
    which: NDArray[np.int64],
    addresses: tuple[int, int],
    shared: SharedRoom,
    written: tuple[int, int],
    own: OwnRoom,
    gates: bool,
) -> None:
    """Some rows of the hidden ones, normed, times weights; or times gate and up, a piece the same outputs of both."""
    last, is_normed = pieces(written[1]), False
    piece = take(counters, phase)
    while piece < last:
        if not is_normed:
            _norm(shape, norm, which, shared.hidden, own.normed)
            is_normed = True
        if gates:
            _gate_piece(piece, kernel, shape, addresses, len(which), written[0], own)
        else:
            multiply_piece(piece, kernel, addresses, (own.normed, len(which), shape.width), written, False)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, last)


@compiled
def _gate_piece(
    piece: int, kernel: Kernel, shape: DecoderShape, addresses: tuple[int, int], rows: int, gated: int, own: OwnRoom
) -> None:
    weights, bias = addresses
    first, count = panels_of(piece, shape.inner)
    step, row_bytes = PIECE * ITEM, shape.width * ITEM
    for half in range(2):
        panel, into = half * shape.inner // LANES + first, own.gates + half * rows * step
        begin(into, step, bias + panel * LANES * ITEM if bias else 0, rows, count * LANES)
        read = weights + panel * panel_bytes(shape.width, kernel.item)
        multiply(kernel.address, kernel.item, read, shape.width, own.normed, row_bytes, into, step, rows, count)
    for row in range(rows):
        gate, made = own.gates + row * step, gated + (row * shape.inner + first * LANES) * ITEM
        gate_row(gate, gate + rows * step, made, count * LANES)


@compiled
def _place(
    counters: NDArray[np.int64],
    phase: int,
    shape: DecoderShape,
    layer: int,
    rows: NDArray[np.int64],
    copied: int,
    shared: SharedRoom,
) -> None:
    """Rotate queries and keys, and put keys and values where their sessions hold them; a piece is a row.

    The layer's input is copied here: every thread has read it, and none has added to it.
    """
    heads, kv_heads, head_bytes = shape.heads, shape.kv_heads, shape.head_dim * ITEM
    piece = take(counters, phase)
    while piece < len(rows):
        row, address, capacity, slot, _, _ = rows[piece]
        start, angle = shared.joined + row * (heads + 2 * kv_heads) * head_bytes, row * head_bytes
        turn_row(start, shared.cosines + angle, shared.sines + angle, heads + kv_heads, shape.head_dim)
        for head in range(2 * kv_heads):
            held = floats(address + head_bytes * ((layer * 2 * kv_heads + head) * capacity + slot))
            new = floats(start + (heads + head) * head_bytes)
            for column in range(shape.head_dim):
                held[column] = new[column]
        if copied:
            given, copy = floats(shared.hidden + row * shape.width * ITEM), floats(copied + row * shape.width * ITEM)
            for column in range(shape.width):
                copy[column] = given[column]
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, len(rows))


@compiled
def _attend(
    counters: NDArray[np.int64],
    phase: int,
    shape: DecoderShape,
    layer: int,
    seen: Seen,
    shared: SharedRoom,
    own: OwnRoom,
) -> None:
    """Attention; a piece is a query head of a row."""
    rows, heads, head_bytes = seen[0], shape.heads, shape.head_dim * ITEM
    last, row_heads = len(rows) * heads, heads + 2 * shape.kv_heads
    piece = take(counters, phase)
    while piece < last:
        index, head = piece // heads, piece % heads
        row = rows[index, 0]
        query = shared.joined + head_bytes * (row * row_heads + head)
        out = shared.attended + head_bytes * (row * heads + head)
        which = (head, heads, shape.kv_heads)
        attend_head(seen, index, which, layer, shape.head_dim, query, out, shape.scale, own.scores)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, last)
