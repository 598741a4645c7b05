"""Tiny block drafters in both published layouts, their target, and what each is by definition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from tests.drafters.formats.eagle_files import RandomTensors
from tests.engine.tiny import random_model
from tests.models.saving import byte_level_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 4, 2, 8, 2
TARGET_LAYERS = 4
SIZE = 4
EPS = 1e-6
OUTPUTS = (0, 2)
"""The target's layers, by their outputs."""
WINDOW = 3


def config(**changes: Any) -> Qwen3Config:
    shape: dict[str, Any] = {
        "vocab_size": len(byte_level_tokenizer()),
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
    }
    shape |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    shape |= {"head_dim": HEAD_DIM, "max_position_embeddings": 256, "rms_norm_eps": EPS}
    return Qwen3Config(**{**shape, "initializer_range": 0.3, "tie_word_embeddings": False, **changes})


def save_target(folder: Path) -> Path:
    tokenizer = byte_level_tokenizer()
    random_model(config(num_hidden_layers=TARGET_LAYERS)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class BlockDefinition:
    """A block drafter as published: one block at a time, nothing kept."""

    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor
    head: torch.Tensor
    mask_token: int
    from_first: bool = False
    windowed: bool = False

    @torch.inference_mode()
    def logits(self, path: Sequence[int], features: torch.Tensor) -> torch.Tensor | None:
        """[V] of the token after `path`, of whose first positions `features` [given, ..] are; None: out of reach."""
        given = len(features)
        place = len(path) - 1 - given + (not self.from_first)
        if not 0 < given < len(path) or place >= SIZE:
            return None
        tokens = [path[given], *[self.mask_token] * (SIZE - 1)]
        context = self._normed(features @ self.tensors["fc.weight"].T, "hidden_norm")
        hidden = self.embedding[torch.tensor(tokens)]
        for layer in range(LAYERS):
            hidden = self._layer(layer, hidden, context)
        return self.head @ self._normed(hidden, "norm")[place]

    def _layer(self, layer: int, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}"
        normed = self._normed(hidden, f"{name}.input_layernorm")
        joined = torch.cat((context, normed))
        q = self._heads(normed, f"{name}.self_attn.q", HEADS, is_normed=True)
        k = self._heads(joined, f"{name}.self_attn.k", KV_HEADS, is_normed=True)
        v = self._heads(joined, f"{name}.self_attn.v", KV_HEADS, is_normed=False)
        angles = torch.arange(len(joined))[:, None] / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = (torch.cat((each, each), dim=1) for each in (angles.cos(), angles.sin()))
        _, k = apply_rotary_pos_emb(k, k, cos, sin, unsqueeze_dim=0)
        _, q = apply_rotary_pos_emb(q, q, cos[len(context) :], sin[len(context) :], unsqueeze_dim=0)
        scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2) / HEAD_DIM**0.5
        if self.windowed:
            back = torch.arange(len(context), len(joined))[:, None] - torch.arange(len(joined))
            scores = scores.masked_fill((back < 0) | (back >= WINDOW), float("-inf"))
        out = scores.softmax(-1) @ v.repeat_interleave(HEADS // KV_HEADS, 0)
        hidden = hidden + out.transpose(0, 1).flatten(1) @ self.tensors[f"{name}.self_attn.o_proj.weight"].T
        return hidden + self._mlp(self._normed(hidden, f"{name}.post_attention_layernorm"), f"{name}.mlp")

    def _mlp(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (self.tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T

    def _heads(self, rows: torch.Tensor, name: str, heads: int, *, is_normed: bool) -> torch.Tensor:
        found = (rows @ self.tensors[f"{name}_proj.weight"].T).view(len(rows), heads, HEAD_DIM)
        found = self._normed(found, f"{name}_norm") if is_normed else found
        return found.transpose(0, 1)

    def _normed(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]


def _random_tensors() -> RandomTensors:
    made = RandomTensors(7)
    made.add("fc.weight", HIDDEN, len(OUTPUTS) * HIDDEN)
    for name in ("hidden_norm", "norm", *(f"layers.{layer}.input_layernorm" for layer in range(LAYERS))):
        made.add(f"{name}.weight", HIDDEN)
    for layer in range(LAYERS):
        made.add_layer(f"layers.{layer}", HIDDEN, qk_norm=True)
    return made


def write_block(folder: Path, target: dict[str, torch.Tensor], layout: str, **changes: Any) -> BlockDefinition:
    """Write a drafter: `z-lab`, or of speculators, also with a vocabulary and a head of its own, or from its anchor.

    `target`: the target's tensors. `changes`: to the configuration as it is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = _random_tensors()
    tensors = dict(made.made)
    embedding, head = target["model.embed_tokens.weight"], target["lm_head.weight"]
    mask, written = len(embedding) - 1, dict(tensors)
    definition = BlockDefinition(tensors, embedding, head, mask, layout == "from the anchor", layout == "windows")
    kinds = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": WINDOW, "use_sliding_window": True}
    layers = config(**kinds if definition.windowed else {}).to_dict()
    if layout in ("z-lab", "windows"):
        own: dict[str, Any] = {"target_layer_ids": [*OUTPUTS], "mask_token_id": mask}
        facts = layers | {"block_size": SIZE, "num_target_layers": TARGET_LAYERS, "dflash_config": own}
    else:
        facts = {"speculators_model_type": "dflash", "transformer_layer_config": layers, "block_size": SIZE}
        facts |= {"mask_token_id": mask, "aux_hidden_state_layer_ids": [each + 1 for each in OUTPUTS]}
        facts |= {"sample_from_anchor": definition.from_first, "draft_vocab_size": len(embedding)}
    if layout == "own vocabulary":
        ids = torch.arange(3, len(embedding), 5)
        made.add("lm_head.weight", len(ids), HIDDEN)
        written["lm_head.weight"] = made.made["lm_head.weight"]
        written |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(len(embedding), dtype=torch.bool)}
        written["t2d"][ids] = True
        facts["draft_vocab_size"] = len(ids)
        definition.head = torch.zeros_like(head)
        definition.head[ids] = written["lm_head.weight"]
    save_file(written, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(facts | changes))
    return definition
