"""Fused layers compute what the model's own layers do; layers of another shape are left alone."""

from __future__ import annotations

import copy

import pytest
import torch

from paceline.engine.cpu import row_math
from paceline.engine.cpu.fused import FusedLayer, _LibraryMath, can_fuse, fuse_layers
from tests.engine import tiny


def test_layers_of_the_known_shape_are_fused_and_no_others() -> None:
    for family, config in tiny.FAMILIES.items():
        model = tiny.random_model(config())
        fuse_layers(model)
        fused = [module for module in model.modules() if isinstance(module, FusedLayer)]
        assert len(fused) == (3 if family in ("llama", "qwen2") else 0)
    layer = tiny.random_model(tiny.llama()).get_submodule("model.layers.0")
    assert can_fuse(layer)
    for add in ("q_norm", "k_norm"):
        other = copy.deepcopy(layer)
        other.self_attn.add_module(add, torch.nn.LayerNorm(8))  # type: ignore[union-attr]
        assert not can_fuse(other)
    gelu = copy.deepcopy(layer)
    gelu.mlp.act_fn = torch.nn.GELU()  # type: ignore[union-attr]
    assert not can_fuse(gelu)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_compiled_operations_compute_what_the_librarys_do(rows: int) -> None:
    torch.manual_seed(rows)
    hidden, qkv, gates, angles = (4 * torch.randn(1, rows, *shape) for shape in ((30,), (7, 16), (50,), (16,)))
    weight = torch.randn(30)
    for operation, arguments in (
        ("rms_norm", (hidden, weight, 1e-5)),
        ("rotate", (qkv.clone(), angles.cos(), angles.sin(), 5)),
        ("silu_and_mul", (gates,)),
    ):
        expected = getattr(_LibraryMath, operation)(*arguments)
        torch.testing.assert_close(getattr(row_math, operation)(*arguments), expected, rtol=2e-6, atol=2e-6)


def test_extreme_gates_are_what_the_library_makes_of_them() -> None:
    for value in (-1e4, -200.0, -88.0, 0.0, 88.0, 1e30, float("nan"), float("inf")):
        gates = torch.full((1, 1, 40), 0.5)
        gates[0, 0, :20] = value
        own, plain = row_math.silu_and_mul(gates), _LibraryMath.silu_and_mul(gates)
        torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-33, equal_nan=True)
