"""One rank's part of a decoder: its heads, its columns of the feed-forward layers, its share of the vocabulary.

transformers' own tensor-parallel plan says which layer is split how; the split itself is ours, since
the packed products of `paceline.engine.cpu.linear` replace layers, and its hooks with them
(docs/decisions/2026-11-21-tensor-parallel-layers-of-our-own.md). A part of a layer is an ordinary
`nn.Linear` over its own slice of the weights, so packing and attention need to know nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from paceline.engine.cpu.linear import SummedLinear, frozen_linear, path_pattern
from paceline.engine.kv import KVShape
from paceline.engine.parallel.draws import Share
from paceline.engine.parallel.group import RankGroup
from paceline.protocol.errors import InvalidInput, Unsupported

COLUMNS = "colwise"
ROWS = "rowwise"
WHOLE = ("replicated_with_grad_allreduce", "replicate")


def check_degree(config: PreTrainedConfig, degree: int) -> None:
    """Refuse a degree that doesn't divide the heads, from the configuration alone.

    Raises:
        InvalidInput: naming heads, KV heads and degree.
    """
    text: Any = config.get_text_config()
    heads: int = text.num_attention_heads
    kv_heads: int = getattr(text, "num_key_value_heads", None) or heads
    if heads % degree or kv_heads % degree:
        common = [n for n in range(1, kv_heads + 1) if heads % n == 0 and kv_heads % n == 0]
        fitting = ", ".join(map(str, common))
        raise InvalidInput.of(
            "tensor_parallel_size",
            degree,
            f"a divisor of the model's {heads} heads and {kv_heads} KV heads: {fitting}",
        )


def shard_shape(shape: KVShape, degree: int, device: torch.device) -> KVShape:
    """The shape of a KV row on one rank.

    Raises:
        Unsupported: a layer's KV heads can't be divided.
    """
    for number, layer in enumerate(shape.layers):
        if layer.kv_heads % degree:
            raise Unsupported(f"{layer.kv_heads} KV heads in layer {number} with {degree} ranks")
    layers = tuple(replace(layer, kv_heads=layer.kv_heads // degree) for layer in shape.layers)
    return replace(shape, layers=layers, device=device)


@torch.inference_mode()
def shard_model(
    model: PreTrainedModel, group: RankGroup, share: Share, dtype: torch.dtype, read_outside: Collection[str] = ()
) -> None:
    """Replace every layer that is split by this rank's part of it; the rest stays whole on every rank.

    `dtype`: that in which the weights serve; a part alone is converted, and of a mapped file alone read.
    `read_outside`: the layers whose weights other code of the model reads.

    Raises:
        Unsupported: transformers has no plan for this model, or one with a split that isn't built.
    """
    name = model.config.model_type
    plan: dict[str, str] = model.tp_plan or {}
    head = model.get_output_embeddings()
    if not any(style == COLUMNS for style in plan.values()):
        raise Unsupported(f"model type {name}: transformers has no tensor-parallel plan for it")
    if type(head) is not nn.Linear:
        raise Unsupported(
            f"model type {name}: {type(head).__name__} makes its logits; tensor parallelism needs a Linear"
        )
    for path in [path for path, _ in model.named_modules()]:
        module, style = model.get_submodule(path), plan.get(path_pattern(path))
        # A row of an embedding is looked up, not computed: every rank keeps all of them.
        if module is head or style is None or style in WHOLE or isinstance(module, nn.Embedding):
            continue
        if style not in (COLUMNS, ROWS) or type(module) is not nn.Linear:
            raise Unsupported(f"model type {name}: {path} is {type(module).__name__}, split {style}; not built")
        if path_pattern(path) in read_outside:
            raise Unsupported(
                f"model type {name}: {path} is split {style}, and other code reads its weights; not built"
            )
        part = _columns(module, group, dtype) if style == COLUMNS else _rows(module, group, dtype)
        _replace(model, path, part)
    model.set_output_embeddings(_slice_linear(head, slice(share.start, share.stop), slice(None), dtype))
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)  # buffers keep their own: rotations need float32


def _columns(linear: nn.Linear, group: RankGroup, dtype: torch.dtype) -> nn.Linear:
    return _slice_linear(linear, _own_slice(linear.out_features, group), slice(None), dtype)


def _rows(linear: nn.Linear, group: RankGroup, dtype: torch.dtype) -> SummedLinear:
    return SummedLinear(_slice_linear(linear, slice(None), _own_slice(linear.in_features, group), dtype), group.sum)


def _own_slice(size: int, group: RankGroup) -> slice:
    """This rank's part of `size` columns; parts differ by at most one."""
    return slice(size * group.rank // group.size, size * (group.rank + 1) // group.size)


def _slice_linear(linear: nn.Linear, outputs: slice, inputs: slice, dtype: torch.dtype) -> nn.Linear:
    """A layer of some outputs and inputs; the bias follows the outputs. Copies, so that the whole can be freed."""
    bias = None if linear.bias is None else linear.bias[outputs].to(dtype, copy=True)
    weight = linear.weight[outputs, inputs].to(dtype, copy=True, memory_format=torch.contiguous_format)
    return frozen_linear(weight, bias)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
