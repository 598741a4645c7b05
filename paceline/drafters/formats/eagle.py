"""EAGLE-1 and EAGLE-3 as SafeAILab publishes them, and those who train in its layout (SpecForge, ModelOpt).

`config.json` is a Llama's, so the tensors tell what it is: `midlayer.*` is EAGLE-3, `layers.0.*` beside `fc` EAGLE-1.
Read in SafeAILab/EAGLE (`eagle/model/cnets.py`, `cnets1.py`, `ea_model.py`, `modeling_llama_kv.py`), November 2026:

- EAGLE-3 joins the *inputs* of layers 2, L/2 and L - 3, in ascending order, and passes on what its layer yields
  before its norm. A draft id's target id is d + d2t[d]; equal vocabularies have no maps.
- EAGLE-1 reads the target's last hidden state behind its norm. Its projection has a bias unless `bias` is false, its
  first layer no norm before attention, and its head is the target's.
- The first row is that of a text's second token, at position 0.

Configurations that list layers (`eagle_config.eagle_aux_hidden_state_layer_ids`) count in two ways, which the first
id tells apart, as SGLang does (its pull request 25454): from 1 on they are outputs, from anything else inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from paceline.drafters.formats.draft_files import read_config, read_tensors
from paceline.drafters.formats.eagle_parts import Eagle3Files, check_target, default_inputs, fill, flag
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.eagle import Eagle1Network
from paceline.drafters.heads.eagle_rows import EagleDraft
from paceline.protocol.errors import Unsupported, require
from paceline.protocol.features import FINAL, FeatureNeed
from paceline.runtime.config import EngineSettings

KIND = "EAGLE"
FEATURES = 3
"""Layers that EAGLE-3 joins where its configuration lists none."""
LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
"""The keys of a Llama's configuration that EAGLE's layers use."""
_IDS = "eagle_aux_hidden_state_layer_ids"
_FREQUENCIES = "rotary_emb.inv_freq"
"""Ends the names of what old versions of transformers saved, and every version computes."""


def is_eagle(names: Collection[str]) -> bool:
    """Whether tensors of these names are EAGLE-1 or EAGLE-3 in SafeAILab's layout.

    EAGLE-1's first layer has no norm before attention, which tells it from other drafters that project features.
    """
    first = "layers.0.mlp.up_proj.weight" in names and "layers.0.input_layernorm.weight" not in names
    return "fc.weight" in names and (first or "midlayer.mlp.up_proj.weight" in names)


def load_eagle(folder: Path, target: TargetWeights, settings: EngineSettings) -> EagleDraft:
    """Read an EAGLE-1 or EAGLE-3 draft.

    Raises:
        InvalidInput: another target's, or tensors that are missing or of another shape.
        DamagedFile: naming the file.
        Unsupported: tensors that no published network has, or quantised ones.
    """
    config = read_config(folder)
    tensors = {name: each for name, each in read_tensors(folder).items() if not name.endswith(_FREQUENCIES)}
    is_third = any(name.startswith("midlayer.") for name in tensors)
    load = _load_eagle3 if is_third else _load_eagle1
    return load(folder.name, config, tensors, target, settings)


def _load_eagle1(
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: TargetWeights,
    settings: EngineSettings,
) -> EagleDraft:
    layers = _layer_config(config)
    check_target(name, layers.hidden_size, layers.vocab_size, target)
    bias, qkv_bias = flag(config, "bias", default=True), flag(config, "qkv_bias")
    with torch.device("meta"):
        network = Eagle1Network(layers, layers.vocab_size, bias=bias, qkv_bias=qkv_bias)
    return EagleDraft(fill(network, tensors, None, target, settings), FeatureNeed((FINAL,)))


def _load_eagle3(
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: TargetWeights,
    settings: EngineSettings,
) -> EagleDraft:
    # Trainers keep some of their settings in a part of their own.
    config = {**config, **(config.get("eagle_config") or {})}
    if not flag(config, "use_aux_hidden_state", default=True):
        raise Unsupported(f"draft {name}: EAGLE-3 with use_aux_hidden_state = false")
    layers = _layer_config(config, attention_bias=flag(config, "attention_bias"))
    require(
        layers.num_hidden_layers == 1, f"draft {name}: num_hidden_layers", layers.num_hidden_layers, "1: midlayer"
    )
    layer_tensors = {each.replace("midlayer.", "layers.0."): tensor for each, tensor in tensors.items()}
    return Eagle3Files(name, config, layers, _inputs(config, target), layer_tensors).load(target, settings)


def _layer_config(config: Mapping[str, Any], *, attention_bias: bool = False) -> LlamaConfig:
    layer_settings = {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
    return LlamaConfig(**layer_settings, attention_bias=attention_bias, tie_word_embeddings=False)


def _inputs(config: Mapping[str, Any], target: TargetWeights) -> tuple[int, ...]:
    """The layers whose inputs are joined."""
    layer_ids = config.get(_IDS)
    if not layer_ids:
        inputs = default_inputs(target.config.num_hidden_layers)
        require(len(inputs) == FEATURES, f"{target.name}: layers", target.config.num_hidden_layers, "at least 7")
        return inputs
    numbers = tuple(int(each) for each in layer_ids)
    return tuple(each + 1 for each in numbers) if numbers[0] == 1 else numbers
