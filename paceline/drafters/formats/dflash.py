"""Block drafters in both published layouts, z-lab's own and speculators 0.9's `dflash` (read in November 2026).

Tensors have the same names in both. Layers are counted in two ways: z-lab's `dflash_config.target_layer_ids` means a
layer's *output* (`hidden_states[id + 1]` of transformers, whose first is the embedding, and whose last is behind the
final norm), speculators' `aux_hidden_state_layer_ids` its *input*, so those ids are larger by one.

A block is the text's last token and masks; position i of it predicts the token at i, or, where `sample_from_anchor`
is set, the one after it. Settings that change a block in other ways are refused by name: DFlash 2's convolutions and
selector, DSpark's and Domino's correction heads, scales of embedding and logits, attention sinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from paceline.drafters.formats.draft_files import read_config, read_tensors
from paceline.drafters.formats.eagle_parts import check_target, draft_size, fill, flag, need_of_inputs, target_ids
from paceline.drafters.formats.speculators_eagle3 import refuse_lossy
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.block import BlockDraft, build_block_engine
from paceline.drafters.heads.block_network import BlockForm, BlockNetwork, Sight
from paceline.engine.features import FeatureEngine
from paceline.protocol.errors import Unsupported, require
from paceline.protocol.features import FINAL, FeatureNeed
from paceline.runtime.config import EngineSettings

KIND = "dflash"
_KIND_KEY = "speculators_model_type"
_ZLAB_KEY = "dflash_config"
_OTHERS = ("dflash2", "dspark", "xpress")
"""Kinds of speculators that fill blocks, too, and correct them by heads of their own."""
_NEUTRAL = {
    "projector_type": "dflash",
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "use_swa": False,
    "selector_rank": 0,
    "conv_kernel_size": 0,
    "is_neox_style": True,
}
"""Settings of other block drafters, with the value at which each changes nothing."""
_TARGET_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the target that training saves, too; they are ignored."""


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is a block drafter's, or of a kind that is refused by name when it is loaded."""
    return config.get(_KIND_KEY) in (KIND, *_OTHERS) or _ZLAB_KEY in config


def load_dflash_engine(folder: Path, target: TargetWeights, settings: EngineSettings) -> FeatureEngine:
    """Load a block drafter as an engine, on the calling thread; raises as `load_dflash`."""
    return build_block_engine(load_dflash(folder, target, settings), target.tokenizer, settings, folder.name)


def load_dflash(folder: Path, target: TargetWeights, settings: EngineSettings) -> BlockDraft:
    """Read a block drafter.

    Raises:
        InvalidInput: another target's, or tensors that are missing or of another shape.
        DamagedFile: naming the file.
        Unsupported: another kind, lossy acceptance, or a setting that changes blocks.
    """
    name, config = folder.name, _flat_config(read_config(folder), folder.name)
    layers = _layer_config(config)
    check_target(name, config.get("target_hidden_size") or layers.hidden_size, layers.vocab_size, target)
    need = _need(config, target, name)
    form = _form(config, layers, len(need.layers), name)
    tensors = {each: tensor for each, tensor in read_tensors(folder).items() if each not in _TARGET_TENSORS}
    size = draft_size(config, tensors, layers.vocab_size)
    ids = target_ids(tensors, size, layers.vocab_size, name)
    with torch.device("meta"):
        network = BlockNetwork(layers, size, form)
    return BlockDraft(fill(network, tensors, ids, target, settings), need, ids)


def _flat_config(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A configuration whose z-lab settings are merged into the others, once it is checked."""
    kind = config.get(_KIND_KEY, KIND)
    if kind != KIND:
        raise Unsupported(f"draft {name}: {_KIND_KEY} = {kind}: of block drafters only {KIND} is served")
    refuse_lossy(config, name)
    flat = {**config, **(config.get(_ZLAB_KEY) or {})}
    for setting, neutral in _NEUTRAL.items():
        if (value := flat.get(setting)) not in (None, neutral):
            raise Unsupported(f"draft {name}: {setting} = {value}: blocks are served without it ({neutral})")
    return flat


def _layer_config(config: Mapping[str, Any]) -> Any:
    """The configuration of the layers: every published block drafter has Qwen3's, whatever its target is."""
    settings = dict(config.get("transformer_layer_config") or config)
    settings.pop("model_type", None)
    layers: Any = Qwen3Config.from_dict(settings)
    return layers


def _need(config: Mapping[str, Any], target: TargetWeights, name: str) -> FeatureNeed:
    inputs = config.get("aux_hidden_state_layer_ids")
    if inputs is not None:
        return need_of_inputs(inputs, target)
    outputs: Sequence[int] = config.get("target_layer_ids") or ()
    layers: int = target.config.num_hidden_layers
    target_layers = config.get("num_target_layers") or layers
    require(
        target_layers == layers,
        f"draft {name}: num_target_layers",
        target_layers,
        f"{layers}, those of {target.name}",
    )
    fits = bool(outputs) and len(set(outputs)) == len(outputs) and all(-1 <= each < layers for each in outputs)
    require(fits, f"draft {name}: target_layer_ids", tuple(outputs), f"different ones of [-1, {layers - 1}]")
    return FeatureNeed(tuple(FINAL if each == layers - 1 else each for each in outputs))


def _form(config: Mapping[str, Any], layers: Any, features: int, name: str) -> BlockForm:
    size, mask = config.get("block_size"), config.get("mask_token_id")
    require(isinstance(size, int) and size >= 2, f"draft {name}: block_size", size, "an integer of at least 2")
    fits = isinstance(mask, int) and 0 <= mask < layers.vocab_size
    require(fits, f"draft {name}: mask_token_id", mask, f"in [0, {layers.vocab_size}), the ids of the embedding")
    assert isinstance(size, int) and isinstance(mask, int)
    sights = tuple(_sight(config, layers, layer) for layer in range(layers.num_hidden_layers))
    return BlockForm(size, mask, flag(config, "sample_from_anchor"), features, sights)


def _sight(config: Mapping[str, Any], layers: Any, layer: int) -> Sight:
    """The horizon of a layer's rows. With a window they see no token ahead, unless speculators says so."""
    kinds = layers.layer_types or ()
    is_windowed = bool(kinds) and kinds[layer] == "sliding_attention"
    causal = is_windowed and not flag(config, "sliding_window_non_causal")
    for setting in ("causal", "is_causal"):
        causal = flag(config, setting, default=causal)
    layer_settings = config.get("transformer_layer_config") or config
    return Sight(layer_settings.get("sliding_window") if is_windowed else None, causal)
