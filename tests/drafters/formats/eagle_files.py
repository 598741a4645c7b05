"""Tiny random EAGLE checkpoints in the layouts that others publish, and a tiny target of theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from paceline.drafters.formats.target_weights import TargetWeights
from paceline.models.resolve import resolve
from paceline.models.tokenizer import TableTokenizer
from paceline.runtime.config import EngineSettings
from tests.engine import tiny

SETTINGS = EngineSettings(threads=1, kv_bytes=1 << 20, device="cpu")
HIDDEN = 32
TARGET_LAYERS = 8
INPUTS = (2, 4, 5)
"""Layers whose inputs EAGLE-3 joins by default, of 8."""
DRAFT_IDS = tuple(range(1, tiny.VOCAB, 3))
Tensors = dict[str, torch.Tensor]
_LAYER: dict[str, Any] = {"vocab_size": tiny.VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48}
_LAYER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_NORMS: dict[str, Any] = {"num_hidden_layers": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_LAYER, **_NORMS}
"""What SafeAILab's configurations look like, whatever the network."""


def target_config(**changes: Any) -> LlamaConfig:
    shape = {**_LAYER, "num_hidden_layers": TARGET_LAYERS, "initializer_range": 0.3, "tie_word_embeddings": False}
    return LlamaConfig(**{**shape, **changes})


def write_target(folder: Path, **changes: Any) -> TargetWeights:
    config = target_config(**changes)
    tiny.random_model(config, seed=7).save_pretrained(folder)
    return TargetWeights(resolve(str(folder)), config, TableTokenizer(tiny.VOCAB, None), SETTINGS)


class RandomTensors:
    """Numbers far enough from zero that a wrong one shows; norms around 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.made: Tensors = {}

    def add(self, name: str, *shape: int) -> None:
        values = torch.randn(shape, generator=self._generator)
        norm = len(shape) == 1 and name.endswith("weight")
        self.made[name] = 1 + 0.3 * values if norm else 0.3 * values

    def add_layer(self, prefix: str, width: int, *, head_dim: int = 8, qk_norm: bool = False) -> None:
        for name, rows in (("q_proj", 4 * head_dim), ("k_proj", 2 * head_dim), ("v_proj", 2 * head_dim)):
            self.add(f"{prefix}.self_attn.{name}.weight", rows, width)
        self.add(f"{prefix}.self_attn.o_proj.weight", HIDDEN, 4 * head_dim)
        for name in ("q_norm", "k_norm") if qk_norm else ():
            self.add(f"{prefix}.self_attn.{name}.weight", head_dim)
        for name in ("gate_proj", "up_proj"):
            self.add(f"{prefix}.mlp.{name}.weight", 48, HIDDEN)
        self.add(f"{prefix}.mlp.down_proj.weight", HIDDEN, 48)
        self.add(f"{prefix}.post_attention_layernorm.weight", HIDDEN)


def eagle1_tensors(*, bias: bool = True) -> Tensors:
    made = RandomTensors(1)
    made.add("embed_tokens.weight", tiny.VOCAB, HIDDEN)
    made.add_layer("layers.0", HIDDEN)
    made.add("fc.weight", HIDDEN, 2 * HIDDEN)
    if bias:
        made.add("fc.bias", HIDDEN)
    return made.made


def eagle3_tensors(
    first: str = "midlayer", *, draft_ids: tuple[int, ...] = DRAFT_IDS, target_hidden: int = HIDDEN, **layer: Any
) -> Tensors:
    made = RandomTensors(3)
    made.add("embed_tokens.weight", tiny.VOCAB, HIDDEN)
    made.add("fc.weight", HIDDEN, 3 * target_hidden)
    made.add_layer(first, 2 * HIDDEN, **layer)
    for name in ("hidden_norm", "input_layernorm"):
        made.add(f"{first}.{name}.weight", HIDDEN)
    made.add("norm.weight", HIDDEN)
    made.add("lm_head.weight", len(draft_ids), HIDDEN)
    if len(draft_ids) < tiny.VOCAB:
        made.made |= vocabulary_maps(draft_ids)
    return made.made


def vocabulary_maps(draft_ids: tuple[int, ...]) -> Tensors:
    """As published: d2t are offsets, t2d says which of the target's ids the draft has."""
    drafted = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    drafted[list(draft_ids)] = True
    return {"d2t": torch.tensor(draft_ids) - torch.arange(len(draft_ids)), "t2d": drafted}


def speculators_config(layer: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    rules: dict[str, Any] = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method]}
    facts: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
    }
    settings: dict[str, Any] = {"norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": None}
    layers: dict[str, Any] = {"model_type": "llama", **_LAYER, **_NORMS, **(layer or {})}
    parts = {"transformer_layer_config": layers, "speculators_config": {**rules, "verifier": verifier}}
    return {**facts, "draft_vocab_size": len(DRAFT_IDS), **settings, **parts, **changes}


def write_draft(folder: Path, config: Mapping[str, Any], tensors: Tensors, *, pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder
