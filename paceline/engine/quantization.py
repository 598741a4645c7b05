"""Weights of eight bits: what can be served with them, and the rounded model whose text they give.

Each output of a linear layer has a scale of its own, the head's too: every step reads all of it. Embeddings, norms
and biases stay as they are: a step reads one row of the embedding for each token, so fewer bits would save no time.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from paceline.engine.cpu.linear import frozen_linear, pack_linears
from paceline.engine.cpu.row_products import has_wide_vectors, in_int8
from paceline.protocol.errors import Unsupported
from paceline.runtime.config import NOT_QUANTIZED, EngineSettings


def quantized_name(name: str, settings: EngineSettings) -> str:
    """A model's name, which tells how its weights are stored: a coordinator takes targets of one name alone."""
    return name if settings.quantization == NOT_QUANTIZED else f"{name}#{settings.quantization}"


def refuse_quantization(
    settings: EngineSettings, device: torch.device, dtypes: Collection[torch.dtype | str], ranks: int = 1
) -> None:
    """Refuse by name what weights of eight bits are not implemented for.

    Args:
        settings: which may ask for them.
        device: where the model will run.
        dtypes: of its weights.
        ranks: how many will share it.

    Raises:
        Unsupported: naming the setting that stands against it.
    """
    if settings.quantization == NOT_QUANTIZED:
        return
    reasons = (
        (device.type != "cpu", f"on {device.type}: CPUs only"),
        (ranks > 1, f"with tensor_parallel_size = {ranks}: one process only"),
        (settings.reproducible, "with reproducible = true: its tiles are of float32"),
        (set(dtypes) != {torch.float32}, f"with weights of {', '.join(map(str, dtypes))}: torch.float32 only"),
        (not has_wide_vectors(), "on this CPU: it has no vectors of 512 bits"),
    )
    for applies, reason in reasons:
        if applies:
            raise Unsupported(f"quantization = {settings.quantization} {reason}")


@torch.inference_mode()
def round_linears(model: torch.nn.Module) -> None:
    """Give every linear layer the weights that its integers and scales stand for; a tied embedding keeps its own."""
    pack_linears(model, _round_linear)


def _round_linear(linear: torch.nn.Linear) -> torch.nn.Linear:
    integers, scales = in_int8(linear.weight.detach())
    return frozen_linear(integers.to(scales.dtype).mul_(scales), linear.bias)
