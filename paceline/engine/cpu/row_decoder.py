"""A whole decoder step as one compiled loop that every thread runs.

What `FusedLayer` computes operation by operation is computed here without returning to Python: the same products,
norms, rotations and attention, row by row and in the same order. A row's numbers are bit-identical either way,
whatever is beside it and however its text was cut into steps (docs/decisions/2026-11-21-a-step-in-one-loop.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from paceline.engine.cpu.fused import FusedLayer, FusedNorm
from paceline.engine.cpu.row_attention import RowAttention
from paceline.engine.cpu.row_phases import PHASES_OF_LAYER, DecoderShape, SharedBuffers, ThreadBuffers, decode_step
from paceline.engine.cpu.row_products import PIECE, Kernel, PanelLinear, padded_outputs
from paceline.engine.cpu.thread_pool import ThreadPool, phases
from paceline.engine.cpu.tiles import LANES
from paceline.protocol.features import EMBEDDING, FINAL

_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Models whose forward passes are embeddings, layers, a norm and a head, with nothing in between."""
_LINE = 16
"""Numbers of a cache line."""


class RowDecoder:
    """Whole steps of any number of rows.

    Args:
        model: one for which `can_decode` holds.
        pool: the threads that compute.
        max_length: the longest session.
    """

    def __init__(self, model: PreTrainedModel, pool: ThreadPool, max_length: int) -> None:
        body: Any = model.model
        head: Any = model.lm_head
        layers: list[FusedLayer] = list(body.layers)
        first = layers[0]
        self._pool = pool
        # Compiled code knows addresses alone; these references keep the memory alive.
        self._modules = (layers, body.norm, head)
        self._embeddings: torch.Tensor = body.embed_tokens.weight.detach()
        self._angles = _Angles(body.rotary_emb, first.head_dim, max_length)
        kernel: Kernel = head.kernel
        weights = np.array([_addresses(layer) for layer in layers], np.int64)
        norms = [norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm)]
        epsilons = np.array([norm.epsilon for norm in (*norms, body.norm)])
        outputs = padded_outputs(head.out_features)
        closing = (body.norm.weight.data_ptr(), head.addresses, outputs)
        self._logits: int = head.out_features
        self._layers = len(layers)
        width, inner = self._embeddings.shape[1], first.down_proj.in_features
        shape = DecoderShape(width, first.heads, first.kv_heads, first.head_dim, inner, np.float32(first.scaling))
        self._model = (kernel, shape, weights, epsilons, closing)
        """As `decode_step` takes it."""
        widths = (width, first.qkv_proj.out_features, first.o_proj.in_features, inner)
        self._buffers = _StepBuffers(pool.threads, widths, outputs)
        self.states: dict[int, torch.Tensor] = {}
        """In the latest step, the output [rows, width] of each of its layers, counted as `FeatureNeed` does."""

    @torch.inference_mode()
    def logits(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        logit_rows: Sequence[int],
        attention: RowAttention,
        layers: Collection[int] = (),
    ) -> torch.Tensor:
        """Write the rows' keys and values.

        Returns:
            Logits [len(logit_rows), tensor width], valid until the next step. So are `states`, the outputs of
            `layers` for all rows.
        """
        rows, buffers = len(token_ids), self._buffers
        buffers.fit(rows, len(logit_rows), attention.scores.size)
        torch.index_select(self._embeddings, 0, torch.tensor(token_ids), out=buffers.hidden[:rows])
        angles = self._angles.gather(positions)
        counters = phases(self._layers * PHASES_OF_LAYER + 1)
        step_buffers = buffers.shared_buffers(*angles)
        row_indices = (np.arange(rows), np.array(logit_rows, np.int64))
        copies, inputs = self._copies(rows, layers)

        def work(thread: int, _angles: object = angles) -> None:
            scratch = buffers.thread_buffers(thread)
            decode_step(counters, *self._model, attention.visible, row_indices, copies, step_buffers, scratch)

        self._pool.run(work)
        self.states = {layer: self._hidden_states(layer, rows, inputs) for layer in layers}
        return buffers.logits[: len(logit_rows), : self._logits]

    def _copies(self, rows: int, layers: Collection[int]) -> tuple[NDArray[np.int64], dict[int, torch.Tensor]]:
        """Addresses to copy layers' inputs [rows, width] to, 0: none; a layer's output is the next's input."""
        next_layers = [layer + 1 for layer in layers if EMBEDDING <= layer < self._layers - 1]
        inputs = {layer: torch.empty((rows, self._embeddings.shape[1])) for layer in next_layers}
        copies = np.zeros(self._layers, np.int64)
        for layer, room in inputs.items():
            copies[layer] = room.data_ptr()
        return copies, inputs

    def _hidden_states(self, layer: int, rows: int, inputs: dict[int, torch.Tensor]) -> torch.Tensor:
        if layer == FINAL:
            states: torch.Tensor = self._modules[1](self._buffers.hidden[None, :rows])
            return states[0]
        return inputs[layer + 1] if layer + 1 in inputs else self._buffers.hidden[:rows]


class _StepBuffers:
    """The buffers of a step, kept from step to step: page faults of fresh memory took milliseconds."""

    def __init__(self, threads: int, widths: tuple[int, int, int, int], outputs: int) -> None:
        self._threads, self._widths, self._outputs = threads, widths, outputs
        self.hidden, self._qkv, self._attention = [torch.empty(0)] * 3
        self._activations, self._norm_rows, self._gates = [torch.empty(0)] * 3
        self._scores = np.empty((threads, 0), np.float32)
        self.logits = torch.empty((0, outputs))

    def fit(self, rows: int, logit_rows: int, keys: int) -> None:
        """Make room for `rows` rows, `logit_rows` of which have logits, and `keys` keys that a row sees."""
        if rows > len(self.hidden):
            count = _power_of_two(rows)
            parts = (torch.empty((count, width)) for width in self._widths)
            self.hidden, self._qkv, self._attention, self._activations = parts
            self._norm_rows = torch.empty((self._threads, count, self._widths[0]))
            self._gates = torch.empty((self._threads, 2, count, PIECE))
        if logit_rows > len(self.logits):
            self.logits = torch.empty((_power_of_two(logit_rows), self._outputs))
        if keys > self._scores.shape[1]:
            self._scores = np.empty((self._threads, _power_of_two(keys + _LINE)), np.float32)

    def shared_buffers(self, cosines: torch.Tensor, sines: torch.Tensor) -> SharedBuffers:
        """The buffers of all threads, with the rows' angles."""
        parts = (self.hidden, self._qkv, self._attention, self._activations, self.logits, cosines, sines)
        return SharedBuffers(*(part.data_ptr() for part in parts))

    def thread_buffers(self, thread: int) -> ThreadBuffers:
        """The buffers of one thread."""
        return ThreadBuffers(self._norm_rows[thread].data_ptr(), self._gates[thread].data_ptr(), self._scores[thread])


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


class _Angles:
    """Cosines and sines of positions, as the model's own module gives them, computed once.

    Some modules change their frequencies past the trained length, so none is called with positions that no session
    can reach.
    """

    def __init__(self, rotary: Any, head_dim: int, max_length: int) -> None:
        self._rotary, self._head_dim, self._max_length = rotary, head_dim, max_length
        self._cosines = self._sines = torch.empty((0, head_dim))

    def gather(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
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
    input_norm, mlp_norm = layer.input_norm.weight.data_ptr(), layer.mlp_norm.weight.data_ptr()
    qkv, out, gate_up, down = (
        cast(PanelLinear, product).addresses
        for product in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    )
    return (input_norm, *qkv, out[0], mlp_norm, *gate_up, down[0])
