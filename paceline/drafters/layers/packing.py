"""Weights on disk: float16 as they are, or int8 rows with a scale each, half the size again."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch

from paceline.engine.cpu.row_products import in_int8
from paceline.protocol.errors import require

_SCALE = ".scale"

Tensors = dict[str, torch.Tensor]


class WeightFormat(StrEnum):
    """The format of a draft's weights on disk."""

    FLOAT16 = "float16"
    INT8 = "int8"
    """Matrices in int8, symmetric, with a float32 scale a row; vectors in float16."""


def pack(weights: Mapping[str, torch.Tensor], form: WeightFormat) -> Tensors:
    """Weights as they are written; int8 is at most half of a row's largest / 127 away from the original."""
    tensors: Tensors = {}
    for name, weight in weights.items():
        whole = weight.detach().cpu()
        if form is WeightFormat.FLOAT16 or whole.ndim < 2:
            tensors[name] = whole.half().contiguous()
            continue
        tensors[name], tensors[name + _SCALE] = in_int8(whole.float())
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The weights that `pack` wrote, as close as its format allows: float32 where it was int8, else as stored.

    Raises:
        InvalidInput: a row's scale is missing or of another shape.
    """
    return {name: _unpack_tensor(name, tensors) for name in tensors if not name.endswith(_SCALE)}


def _unpack_tensor(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors[name]
    if tensor.dtype != torch.int8:
        return tensor
    scale = tensors.get(name + _SCALE, torch.empty(0))
    shape = (len(tensor), 1)
    require(tuple(scale.shape) == shape, f"weights {name}{_SCALE}", tuple(scale.shape), f"of shape {shape}")
    return tensor.float() * scale
