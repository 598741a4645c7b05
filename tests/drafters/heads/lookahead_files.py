"""Tiny random heads as their authors write them, and what they say by definition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engine.tiny import VOCAB

HIDDEN, HEADS = 32, 3
Tensors = dict[str, torch.Tensor]


def seeded(*shape: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    scaled: torch.Tensor = drawn * float(shape[-1]) ** -0.5
    return scaled


def own_tensors(layers: int = 2, heads: int = HEADS, *, outputs: bool = True, hidden: int = HIDDEN) -> Tensors:
    """FasterDecoding's names."""
    found: Tensors = {}
    for head in range(heads):
        for layer in range(layers):
            found[f"{head}.{layer}.linear.weight"] = seeded(hidden, hidden, seed=10 * head + layer)
            found[f"{head}.{layer}.linear.bias"] = seeded(hidden, seed=50 + 10 * head + layer)
        if outputs:
            found[f"{head}.{layers}.weight"] = seeded(VOCAB, hidden, seed=100 + head)
    return found


def vllm_tensors(layers: int = 2, heads: int = HEADS) -> Tensors:
    """The same heads by vLLM's names."""
    found: Tensors = {}
    for name, tensor in own_tensors(layers, heads).items():
        head, layer, *rest = name.split(".")
        is_output = int(layer) == layers
        found[f"lm_heads.{head}.weight" if is_output else f"blocks.{head}.layers.{layer}.{rest[-1]}"] = tensor
    return found


def write(folder: Path, tensors: Tensors, file: str, config: Mapping[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def medusa_says(tensors: Tensors, head: int, feature: torch.Tensor) -> torch.Tensor:
    """Logits [V] of one head, from FasterDecoding's tensors."""
    layers = sum(name.startswith("0.") and name.endswith("linear.weight") for name in tensors)
    for layer in range(layers):
        weight, bias = tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"]
        feature = feature + torch.nn.functional.silu(weight @ feature + bias)
    return tensors[f"{head}.{layers}.weight"] @ feature
