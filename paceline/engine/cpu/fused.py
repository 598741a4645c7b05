"""Decoder layers of the Llama shape with as few operations as their arithmetic needs.

A step of few rows spends as long between its products as in them: thirty small operations a layer, each behind a
Python module. A fused layer has one product for queries, keys and values, one for gate and up, and no module calls in
between; in float32 on a CPU, what stands between is compiled. The numbers are the same up to the order in which a
product sums; the engine's self-check compares them with the model's own forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from paceline.engine.cpu import row_math
from paceline.engine.cpu.linear import SummedLinear, frozen_linear
from paceline.engine.forward import AttentionCall, attend


class FusedLayer(nn.Module):
    """One pre-norm decoder layer: RMS norm, rotary attention, RMS norm, SiLU-gated MLP.

    Args:
        layer: a layer for which `can_fuse` holds; it is not used afterwards.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.head_dim: int = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.input_norm = FusedNorm(layer.input_layernorm)
        self.mlp_norm = FusedNorm(layer.post_attention_layernorm)
        self.qkv_proj = _merge(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.gate_up_proj = _merge(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj
        self.math: Any = math_for(layer.input_layernorm.weight)

    def forward(
        self, hidden: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """[1, rows, width] → the same; `position_embeddings` are cosines and sines, each [1, rows, head_dim]."""
        hidden = hidden + self.o_proj(self._attention(self.input_norm(hidden), position_embeddings))
        activations = self.math.silu_and_mul(self.gate_up_proj(self.mlp_norm(hidden)))
        output: torch.Tensor = self.down_proj(activations)
        return output.add_(hidden)

    def _attention(
        self, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        rotary_heads = self.heads + self.kv_heads
        qkv = self.qkv_proj(hidden).view(1, hidden.shape[1], -1, self.head_dim)  # [1, rows, all heads, head_dim]
        both = self.math.rotate(qkv, *position_embeddings, rotary_heads).transpose(1, 2)
        value = qkv[:, :, rotary_heads:].transpose(1, 2)
        call = AttentionCall(self, both[:, : self.heads], both[:, self.heads :], value, self.scaling)
        return attend(call).reshape(1, hidden.shape[1], -1)


class FusedNorm(nn.Module):
    """RMS norm (arXiv 1910.07467).

    Args:
        norm: one that `is_norm` knows.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        is_centred = type(norm).__name__ in _CENTRED_NORMS
        self.weight: torch.Tensor = 1 + norm.weight.detach() if is_centred else norm.weight.detach()
        self.epsilon: float = norm.eps if is_centred else norm.variance_epsilon
        self.math: Any = math_for(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] → the same."""
        output: torch.Tensor = self.math.rms_norm(hidden.contiguous(), self.weight, self.epsilon)
        return output


def is_norm(norm: nn.Module) -> bool:
    """Whether a module is the RMS norm that `FusedNorm` computes."""
    name = type(norm).__name__
    return name in _NORMS or (name in (*_STATEFUL_NORMS, *_CENTRED_NORMS) and norm.weight.dtype == torch.float32)


def can_fuse(layer: nn.Module) -> bool:
    """Whether a layer is of the one shape that `FusedLayer` computes; anything else about it says no."""
    parts = dict(layer.named_children())
    if set(parts) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = dict(parts["self_attn"].named_children()), dict(parts["mlp"].named_children())
    input_projections = [attention.pop(name, None) for name in ("q_proj", "k_proj", "v_proj")]
    input_projections += [mlp.pop(name, None) for name in ("gate_proj", "up_proj")]
    output_projections = [attention.pop("o_proj", None), mlp.pop("down_proj", None)]
    activation = mlp.pop("act_fn", None)
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    return (
        not attention
        and not mlp
        and type(layer).__name__ in _LAYERS
        and all(type(linear) is nn.Linear for linear in input_projections)
        and all(type(linear) in (nn.Linear, SummedLinear) for linear in output_projections)
        and type(activation) in (nn.SiLU, SiLUActivation)
        and all(is_norm(norm) for norm in norms)
    )


_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm")
"""Classes with a known forward pass; one of another name may compute something else with the same parts."""
_STATEFUL_FAMILIES = (
    *("Bamba", "FalconH1", "FalconMamba", "GraniteMoeHybrid", "Jamba", "KimiLinear", "LaraMini"),
    *("Lfm2", "Lfm2Moe", "Lfm3", "Mamba", "Mamba2", "NemotronH", "OlmoHybrid"),
)
_STATEFUL_NORMS = tuple(f"{family}RMSNorm" for family in _STATEFUL_FAMILIES)
"""The same beside recurrent layers, in float32: they differ in where they round to other dtypes."""
_CENTRED_NORMS = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
"""Likewise, with weights around 0 instead of 1."""


@torch.inference_mode()
def fuse_layers(model: nn.Module) -> None:
    """Replace every layer that can be fused, and the norm behind the last."""
    for stack in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(stack):
            if can_fuse(layer):
                stack[index] = FusedLayer(layer)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_norm(child):
                setattr(parent, name, FusedNorm(child))


def _merge(*linears: nn.Linear) -> nn.Linear:
    """One product for several of the same input."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    has_bias = linears[0].bias is not None
    return frozen_linear(weight, torch.cat([linear.bias.detach() for linear in linears]) if has_bias else None)


def math_for(weight: torch.Tensor) -> Any:
    """The operations between products: compiled loops in float32 on a CPU, the library's elsewhere."""
    compiles = weight.device.type == "cpu" and weight.dtype == torch.float32
    return row_math if compiles else _LibraryMath


class _LibraryMath:
    """The operations of `row_math`, for any device and dtype."""

    @staticmethod
    def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return functional.rms_norm(rows, weight.shape, weight, epsilon)

    @staticmethod
    def rotate(qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> torch.Tensor:
        queries_keys = qkv[:, :, :heads]
        first, second = queries_keys.chunk(2, dim=-1)
        halves = torch.cat((-second, first), dim=-1)
        return (queries_keys * cosines.unsqueeze(2)).addcmul_(halves, sines.unsqueeze(2))

    @staticmethod
    def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
