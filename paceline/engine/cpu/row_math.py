"""The operations between a decoder's products, compiled for few rows on a CPU, in float32.

A library operation on one row takes microseconds to start and nanoseconds to compute, and a layer has
thirty of them. These take addresses, which cost nothing to pass. A row's numbers depend on no other row.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from paceline.runtime.compiled import compiled
from paceline.sampling.ranking import REORDER, exp

ITEM = 4
"""Bytes of a float32."""
_FLOATS: Any = types.CPointer(types.float32)  # type: ignore[no-untyped-call]
_float = np.float32


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm (arXiv 1910.07467) of [..., width]."""
    assert rows.is_contiguous() and weight.is_contiguous()
    out = torch.empty_like(rows)
    width = rows.shape[-1]
    _norm_rows(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), rows.numel() // width, width, epsilon)
    return out


def rotate(qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary embedding (RoFormer, arXiv 2104.09864), halves rotated, of the first `heads` heads, in place.

    Args:
        joined: [1, n, all heads, head_dim].
        cosines, sines: [1, n, head_dim].
    """
    assert qkv.is_contiguous() and cosines.is_contiguous() and sines.is_contiguous()
    _, count, all_heads, head_dim = qkv.shape
    _rotate_rows(qkv.data_ptr(), cosines.data_ptr(), sines.data_ptr(), count, heads, all_heads, head_dim)
    return qkv[:, :, :heads]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half times the second: [1, n, 2 · width] → [1, n, width]."""
    assert gate_up.is_contiguous()
    _, count, both = gate_up.shape
    out = gate_up.new_empty((1, count, both // 2))
    _gate_rows(gate_up.data_ptr(), out.data_ptr(), count, both // 2)
    return out


compiled_math = partial(compiled, fastmath=REORDER)


def _emit_floats(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(_FLOATS))

    return _FLOATS(types.int64), generate


floats: Any = intrinsic(_emit_floats)
"""In compiled code: the floats at an address, to be read and written."""


@compiled_math
def norm_row(row: int, weight: int, out: int, width: int, epsilon: float) -> None:
    """In compiled code: RMS norm of one row."""
    scales, inputs, outputs = floats(weight), floats(row), floats(out)
    total = _float(0)
    for column in range(width):
        total += inputs[column] * inputs[column]
    factor = _float(1 / math.sqrt(total / width + epsilon))
    for column in range(width):
        outputs[column] = inputs[column] * factor * scales[column]


@compiled_math
def turn_row(row: int, cosines: int, sines: int, heads: int, head_dim: int) -> None:
    """In compiled code: rotary embedding of one row's first heads, in place."""
    half = head_dim // 2
    low_cos, low_sin = floats(cosines), floats(sines)
    high_cos, high_sin = floats(cosines + half * ITEM), floats(sines + half * ITEM)
    for head in range(heads):
        start = row + head * head_dim * ITEM
        low, high = floats(start), floats(start + half * ITEM)
        for column in range(half):
            first, second = low[column], high[column]
            low[column] = first * low_cos[column] - second * low_sin[column]
            high[column] = second * high_cos[column] + first * high_sin[column]


@compiled_math
def gate_row(gate: int, up: int, out: int, width: int) -> None:
    """In compiled code: SiLU of one row times another."""
    gates, ups, outputs = floats(gate), floats(up), floats(out)
    for column in range(width):
        share = exp(min(gates[column], _float(0))) / (_float(1) + exp(-abs(gates[column])))
        outputs[column] = gates[column] * share * ups[column]


@compiled
def _norm_rows(rows: int, weight: int, out: int, count: int, width: int, epsilon: float) -> None:
    for row in range(count):
        norm_row(rows + row * width * ITEM, weight, out + row * width * ITEM, width, epsilon)


@compiled
def _rotate_rows(qkv: int, cosines: int, sines: int, count: int, heads: int, all_heads: int, head_dim: int) -> None:
    for row in range(count):
        angle = row * head_dim * ITEM
        turn_row(qkv + row * all_heads * head_dim * ITEM, cosines + angle, sines + angle, heads, head_dim)


@compiled
def _gate_rows(gate_up: int, out: int, count: int, width: int) -> None:
    for row in range(count):
        gate = gate_up + 2 * row * width * ITEM
        gate_row(gate, gate + width * ITEM, out + row * width * ITEM, width)
