"""Hydra's heads as their authors write them (`hydra_lm_head.pt`), read in November 2026.

Head i: `hydra_mlp.{i}.0.{linear,res_connection}.{weight,bias}`, which join the hidden state and the embeddings of
i + 1 tokens, residual layers `hydra_mlp.{i}.{j}.linear.{weight,bias}` (one module that is stored under every j), and
`hydra_lm_head.{i}.{weight,bias}`. Embeddings are the target's. `hidden_state_offset` counts back from the hidden
state behind the last norm; 1 is the output of the last layer but one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.formats.draft_files import read_config_if_any, read_tensors
from paceline.formats.head_files import (
    counted,
    each_of,
    fill,
    frozen,
    refuse_typical_acceptance,
    require_exactly,
    require_hidden_size,
    require_vocabulary,
    serve,
)
from paceline.formats.target_weights import TargetWeights
from paceline.heads.hydra import HydraHeads
from paceline.heads.lookahead import LookaheadEngine
from paceline.protocol.errors import Unsupported, require
from paceline.protocol.features import FINAL, FeatureNeed
from paceline.runtime.config import EngineSettings

KIND = "hydra"
_LAYER = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_OUTPUT = "hydra_lm_head.{head}.weight"
_ARCHITECTURE = "mlp"


def is_hydra(names: Iterable[str]) -> bool:
    """Whether a folder's tensors are Hydra's."""
    return any(_LAYER.fullmatch(name) for name in names)


def load_hydra(folder: Path, target: TargetWeights, settings: EngineSettings) -> LookaheadEngine:
    """Read such a folder onto its target.

    Raises:
        InvalidInput: tensors that are missing, or of another hidden size or vocabulary than the target's.
        DamagedFile: naming the file.
        Unsupported: typical acceptance, another architecture (Hydra++'s prefix layer), heads that read no tokens.
    """
    name, config = folder.name, read_config_if_any(folder)
    refuse_typical_acceptance(config, name)
    architecture = config.get("hydra_head_arch", _ARCHITECTURE)
    if architecture != _ARCHITECTURE:
        raise Unsupported(f"draft {name}: hydra_head_arch = {architecture}: only {_ARCHITECTURE} is served")
    tensors = read_tensors(folder)
    return serve(_heads(name, config, tensors, target), name, KIND, target, settings)


def _heads(
    name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: TargetWeights
) -> HydraHeads:
    numbers = [(int(match[1]), int(match[2])) for match in map(_LAYER.fullmatch, tensors) if match]
    heads = counted(name, "heads", (head for head, _ in numbers))
    layers = counted(name, "layers", (layer for _, layer in numbers))
    if "hydra_mlp.0.0.res_connection.weight" not in tensors:
        raise Unsupported(f"draft {name}: heads without res_connection (grounded_heads = false) read no tokens")
    hidden: int = target.config.hidden_size
    require_hidden_size(name, int(tensors["hydra_mlp.0.0.linear.weight"].shape[0]), target)
    outputs = [_OUTPUT.format(head=head) for head in range(heads)]
    for output in outputs:
        if output in tensors:
            require_vocabulary(name, int(tensors[output].shape[0]), target)
    blocks = _block_shapes(heads, layers, hidden)
    width: int = target.config.vocab_size
    ends = dict.fromkeys(outputs, (width, hidden)) | {_bias(output): (width,) for output in outputs}
    require_exactly(name, tensors, blocks | ends)
    last = [frozen(tensors[output], tensors[_bias(output)]) for output in outputs]
    made = HydraHeads(_embedding(target), _need(name, config, target), layers, last)
    fill(made, {f"blocks.{each.removeprefix('hydra_mlp.')}": tensors[each] for each in blocks})
    return made


def _block_shapes(heads: int, layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head, layer in each_of(heads, layers):
        joined = (head + 2) * hidden if layer == 0 else hidden
        for part in ("linear", "res_connection") if layer == 0 else ("linear",):
            stem = f"hydra_mlp.{head}.{layer}.{part}"
            shapes |= {f"{stem}.weight": (hidden, joined), f"{stem}.bias": (hidden,)}
    return shapes


def _need(name: str, config: Mapping[str, Any], target: TargetWeights) -> FeatureNeed:
    offset, layers = int(config.get("hidden_state_offset") or 0), int(target.config.num_hidden_layers)
    require(0 <= offset < layers, f"draft {name} hidden_state_offset", offset, f"in [0, {layers - 1}]")
    return FeatureNeed((FINAL if offset == 0 else layers - 1 - offset,))


def _embedding(target: TargetWeights) -> nn.Embedding:
    embedding: nn.Embedding = nn.Embedding.from_pretrained(target.embedding(), freeze=True)
    return embedding


def _bias(output: str) -> str:
    return output.removesuffix("weight") + "bias"
