"""A whole decoder step as one compiled loop that every thread runs.

What `FusedLayer` computes operation by operation is computed here without
returning to Python: the same products, norms, rotations and attention, row by
row and in the same order, so a row's numbers are the same bits either way,
whatever is beside it and however its text was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from paceline.compiled import compiled
from paceline.engine.crew import Crew, finish, phases, take, wait
from paceline.engine.fused import FusedLayer, FusedNorm
from paceline.engine.row_attention import RowAttention, attend_head
from paceline.engine.row_math import ITEM, floats, gate_row, norm_row, turn_row
from paceline.engine.row_products import (
    LANES,
    PIECE,
    Kernel,
    PanelLinear,
    begin,
    multiply,
    multiply_piece,
    padded,
    panel_bytes,
    panels_of,
    pieces,
)

_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Whose forward passes were read: embeddings, layers, a norm and a head, with nothing in between."""
_PHASES_OF_LAYER = 6
_INPUT_NORM, _QKV, _QKV_BIAS, _OUT, _MLP_NORM, _GATE_UP, _GATE_UP_BIAS, _DOWN = range(8)
"""Columns of the layers' addresses."""
_LINE = 16
"""Numbers of a cache line."""


class _Shape(NamedTuple):
    """Of a decoder, in compiled code."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    scale: np.float32


class _Shared(NamedTuple):
    """Addresses of what all threads read and write, in compiled code."""

    hidden: int  # [rows, width]
    joined: int  # [rows, (heads + 2 · kv_heads) · head_dim]: queries, keys, values
    attended: int  # [rows, heads · head_dim]
    gated: int  # [rows, inner]
    logits: int  # [wanted, outputs]
    cosines: int  # [rows, head_dim]
    sines: int  # [rows, head_dim]


class _Own(NamedTuple):
    """What a thread has for itself, in compiled code."""

    normed: int  # address of [rows, width]
    gates: int  # address of [2, rows, PIECE]
    scores: NDArray[np.float32]


class RowDecoder:
    """Whole steps of any number of rows.

    Args:
        model: one for which `can_decode` holds.
        crew: the threads that compute.
        max_length: the longest session.
    """

    def __init__(self, model: PreTrainedModel, crew: Crew, max_length: int) -> None:
        body: Any = model.model
        head: Any = model.lm_head
        layers: list[FusedLayer] = list(body.layers)
        first = layers[0]
        self._crew = crew
        # Compiled code has addresses; these keep what is there.
        self._modules = (layers, body.norm, head)
        self._embeddings: torch.Tensor = body.embed_tokens.weight.detach()
        self._angles = _Angles(body.rotary_emb, first.head_dim, max_length)
        self._kernel: Kernel = head.kernel
        self._weights = np.array([_addresses(layer) for layer in layers], np.int64)
        norms = [norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm)]
        self._epsilons = np.array([norm.epsilon for norm in (*norms, body.norm)])
        outputs = padded(head.out_features)
        self._head = (body.norm.weight.data_ptr(), head.addresses, outputs)
        self._logits: int = head.out_features
        width, inner = self._embeddings.shape[1], first.down_proj.in_features
        self._shape = _Shape(width, first.heads, first.kv_heads, first.head_dim, inner, np.float32(first.scaling))
        widths = (width, first.qkv_proj.out_features, first.o_proj.in_features, inner)
        self._room = _Room(crew.threads, widths, outputs)

    @torch.inference_mode()
    def logits(
        self, token_ids: Sequence[int], positions: Sequence[int], wanted: Sequence[int], attention: RowAttention
    ) -> torch.Tensor:
        """Write the rows' keys and values; returns logits [len(wanted), tensor width], valid until the next step."""
        rows, room = len(token_ids), self._room
        room.fit(rows, len(wanted), attention.scores.size)
        torch.index_select(self._embeddings, 0, torch.tensor(token_ids), out=room.hidden[:rows])
        angles = self._angles.of(positions)
        counters = phases(len(self._weights) * _PHASES_OF_LAYER + 1)
        shared = room.shared(*angles)
        seen = (attention.rows, attention.starts, attention.others)
        which = (np.arange(rows), np.array(wanted, np.int64))

        def work(thread: int, _held: object = angles) -> None:
            own = room.own(thread)
            _decode(
                counters,
                self._kernel,
                self._shape,
                self._weights,
                self._epsilons,
                self._head,
                seen,
                which,
                shared,
                own,
            )

        self._crew.run(work)
        return room.logits[: len(wanted), : self._logits]


class _Room:
    """What a step computes in, kept from step to step: fresh memory takes longer to be given than to be filled."""

    def __init__(self, threads: int, widths: tuple[int, int, int, int], outputs: int) -> None:
        self._threads, self._widths, self._outputs = threads, widths, outputs
        self.hidden, self._joined, self._attended, self._gated, self._normed, self._gates = [torch.empty(0)] * 6
        self._scores = np.empty((threads, 0), np.float32)
        self.logits = torch.empty((0, outputs))

    def fit(self, rows: int, wanted: int, keys: int) -> None:
        """Have room for so many rows, rows with logits, and keys that a row sees."""
        if rows > len(self.hidden):
            count = _power_of_two(rows)
            parts = (torch.empty((count, width)) for width in self._widths)
            self.hidden, self._joined, self._attended, self._gated = parts
            self._normed = torch.empty((self._threads, count, self._widths[0]))
            self._gates = torch.empty((self._threads, 2, count, PIECE))
        if wanted > len(self.logits):
            self.logits = torch.empty((_power_of_two(wanted), self._outputs))
        if keys > self._scores.shape[1]:
            self._scores = np.empty((self._threads, _power_of_two(keys + _LINE)), np.float32)

    def shared(self, cosines: torch.Tensor, sines: torch.Tensor) -> _Shared:
        """What all threads use, with the rows' angles."""
        parts = (self.hidden, self._joined, self._attended, self._gated, self.logits, cosines, sines)
        return _Shared(*(part.data_ptr() for part in parts))

    def own(self, thread: int) -> _Own:
        """What one thread uses."""
        return _Own(self._normed[thread].data_ptr(), self._gates[thread].data_ptr(), self._scores[thread])


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


class _Angles:
    """Cosines and sines of positions, as the model's own module gives them, computed once.

    Some modules change their frequencies past the trained length, so none is asked for more than a session may reach.
    """

    def __init__(self, rotary: Any, head_dim: int, max_length: int) -> None:
        self._rotary, self._head_dim, self._max_length = rotary, head_dim, max_length
        self._cosines = self._sines = torch.empty((0, head_dim))

    def of(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Each [rows, head_dim]."""
        last = max(positions)
        if last >= len(self._cosines):
            like = torch.empty((1, 1, self._head_dim))
            count = max(last + 1, min(_power_of_two(last + 1), self._max_length))
            cosines, sines = self._rotary(like, torch.arange(count)[None])
            self._cosines, self._sines = cosines[0], sines[0]
        index = torch.tensor(positions)
        return self._cosines[index], self._sines[index]


def can_decode(model: PreTrainedModel) -> bool:
    """Whether a model whose layers were fused and laid out in panels is one that `RowDecoder` computes."""
    if type(model).__name__ not in _MODELS:
        return False
    body: Any = model.model
    return (
        isinstance(model.lm_head, PanelLinear)
        and isinstance(body.norm, FusedNorm)
        and all(_is_known(layer) for layer in body.layers)
    )


def _is_known(layer: nn.Module) -> bool:
    if not isinstance(layer, FusedLayer):
        return False
    products = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    widths = (layer.qkv_proj.out_features, layer.down_proj.in_features, layer.down_proj.out_features)
    return (
        all(isinstance(product, PanelLinear) for product in products)
        and layer.o_proj.bias is None
        and layer.down_proj.bias is None
        and all(width % LANES == 0 for width in widths)
    )


def _addresses(layer: FusedLayer) -> tuple[int, ...]:
    before, behind = layer.input_norm.weight.data_ptr(), layer.mlp_norm.weight.data_ptr()
    qkv, out, gate_up, down = (
        cast(PanelLinear, product).addresses
        for product in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    )
    return (before, *qkv, out[0], behind, *gate_up, down[0])


_Norm = tuple[int, float]
"""Address of its weight, and epsilon."""
_Seen = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""`rows`, `starts` and `others` of `RowAttention`."""


@compiled
def _decode(
    counters: NDArray[np.int64],
    kernel: Kernel,
    shape: _Shape,
    layers: NDArray[np.int64],
    epsilons: NDArray[np.float64],
    head: tuple[int, tuple[int, int], int],
    seen: _Seen,
    which: tuple[NDArray[np.int64], NDArray[np.int64]],
    shared: _Shared,
    own: _Own,
) -> None:
    """All phases of a step. `which` are the indices of all rows and of those whose logits are wanted."""
    every, wanted = which
    rows, attended = len(every), shape.heads * shape.head_dim
    joined = attended + 2 * shape.kv_heads * shape.head_dim
    phase = 0
    for layer in range(len(layers)):
        of = layers[layer]
        norm, written = (of[_INPUT_NORM], epsilons[2 * layer]), (shared.joined, joined)
        _normed_product(counters, phase, kernel, shape, norm, every, (of[_QKV], of[_QKV_BIAS]), shared, written, own)
        _place(counters, phase + 1, shape, layer, seen[0], shared)
        _attend(counters, phase + 2, shape, layer, seen, shared, own)
        read, written = (shared.attended, rows, attended), (shared.hidden, shape.width)
        _added_product(counters, phase + 3, kernel, of[_OUT], read, written)
        norm, gates = (of[_MLP_NORM], epsilons[2 * layer + 1]), (of[_GATE_UP], of[_GATE_UP_BIAS])
        _gated_product(counters, phase + 4, kernel, shape, norm, every, gates, shared, own)
        read = (shared.gated, rows, shape.inner)
        _added_product(counters, phase + 5, kernel, of[_DOWN], read, written)
        phase += _PHASES_OF_LAYER
    weight, addresses, outputs = head
    norm, written = (weight, epsilons[-1]), (shared.logits, outputs)
    _normed_product(counters, phase, kernel, shape, norm, wanted, addresses, shared, written, own)


def _norm_rows(shape: _Shape, norm: _Norm, which: NDArray[np.int64], hidden: int, normed: int) -> None:
    weight, epsilon = norm
    row_bytes = shape.width * ITEM
    for index in range(len(which)):
        norm_row(hidden + which[index] * row_bytes, weight, normed + index * row_bytes, shape.width, epsilon)


_norm = compiled(_norm_rows, inlined=True)
"""Every thread does this for itself: it takes less than to wait for another to do it."""


@compiled
def _normed_product(
    counters: NDArray[np.int64],
    phase: int,
    kernel: Kernel,
    shape: _Shape,
    norm: _Norm,
    which: NDArray[np.int64],
    addresses: tuple[int, int],
    shared: _Shared,
    written: tuple[int, int],
    own: _Own,
) -> None:
    """Some rows of the hidden ones, normed, times weights."""
    last, is_normed = pieces(written[1]), False
    piece = take(counters, phase)
    while piece < last:
        if not is_normed:
            _norm(shape, norm, which, shared.hidden, own.normed)
            is_normed = True
        multiply_piece(piece, kernel, addresses, (own.normed, len(which), shape.width), written, False)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, last)


@compiled
def _added_product(
    counters: NDArray[np.int64],
    phase: int,
    kernel: Kernel,
    weights: int,
    read: tuple[int, int, int],
    written: tuple[int, int],
) -> None:
    """A product that is added to the hidden rows."""
    last = pieces(written[1])
    piece = take(counters, phase)
    while piece < last:
        multiply_piece(piece, kernel, (weights, 0), read, written, True)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, last)


@compiled
def _gated_product(
    counters: NDArray[np.int64],
    phase: int,
    kernel: Kernel,
    shape: _Shape,
    norm: _Norm,
    which: NDArray[np.int64],
    addresses: tuple[int, int],
    shared: _Shared,
    own: _Own,
) -> None:
    """Hidden rows, normed, times gate and up: a piece is the same outputs of both, gated."""
    last, is_normed = pieces(shape.inner), False
    piece = take(counters, phase)
    while piece < last:
        if not is_normed:
            _norm(shape, norm, which, shared.hidden, own.normed)
            is_normed = True
        _gate_piece(piece, kernel, shape, addresses, len(which), shared.gated, own)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, last)


@compiled
def _gate_piece(
    piece: int, kernel: Kernel, shape: _Shape, addresses: tuple[int, int], rows: int, gated: int, own: _Own
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
    counters: NDArray[np.int64], phase: int, shape: _Shape, layer: int, rows: NDArray[np.int64], shared: _Shared
) -> None:
    """Rotate queries and keys, and put keys and values where their sessions hold them; a piece is a row."""
    heads, kv_heads, head_bytes = shape.heads, shape.kv_heads, shape.head_dim * ITEM
    piece = take(counters, phase)
    while piece < len(rows):
        row, address, capacity, slot, _ = rows[piece]
        start, angle = shared.joined + row * (heads + 2 * kv_heads) * head_bytes, row * head_bytes
        turn_row(start, shared.cosines + angle, shared.sines + angle, heads + kv_heads, shape.head_dim)
        for head in range(2 * kv_heads):
            held = floats(address + head_bytes * ((layer * 2 * kv_heads + head) * capacity + slot))
            new = floats(start + (heads + head) * head_bytes)
            for column in range(shape.head_dim):
                held[column] = new[column]
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, len(rows))


@compiled
def _attend(
    counters: NDArray[np.int64], phase: int, shape: _Shape, layer: int, seen: _Seen, shared: _Shared, own: _Own
) -> None:
    """Attention; a piece is a query head of a row."""
    rows, starts, others = seen
    heads, kv_heads, head_bytes = shape.heads, shape.kv_heads, shape.head_dim * ITEM
    last = len(rows) * heads
    piece = take(counters, phase)
    while piece < last:
        index, head = piece // heads, piece % heads
        row, address, capacity, _, first = rows[index]
        behind = others[starts[index] : starts[index + 1]]
        keys = address + head_bytes * capacity * (layer * 2 * kv_heads + head * kv_heads // heads)
        values = keys + head_bytes * capacity * kv_heads
        query = shared.joined + head_bytes * (row * (heads + 2 * kv_heads) + head)
        out = shared.attended + head_bytes * (row * heads + head)
        attend_head(query, keys, values, out, first, behind, shape.head_dim, shape.scale, own.scores)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, last)
