"""Tiny checkpoints with multi-token prediction in the layouts that are published, and what each is by definition."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from tests.engine.tiny import VOCAB, biased, random_model
from tests.models.saving import change_json, save_with_tokenizer

HIDDEN = 32
OWN_LAYERS = 2
FAINT = 0.01
_SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "head_dim": 8}
_SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
# Far from zero, so that a wrong row moves logits by much more than rounding.
_SHAPE |= {"initializer_range": 0.3, "tie_word_embeddings": False}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED: dict[str, Any] = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}


def glm4_moe(layers: int) -> PreTrainedConfig:
    return Glm4MoeConfig(**_SHAPE, **_SHARED, num_hidden_layers=layers)


def deepseek_v3(layers: int, kind: Callable[..., PreTrainedConfig] = DeepseekV3Config) -> PreTrainedConfig:
    """Latent attention, whose keys and values have widths of their own."""
    shape: dict[str, Any] = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    shape |= {"num_key_value_heads": shape["num_attention_heads"], "n_group": 1, "topk_group": 1}
    shape |= {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    return kind(**shape, **_SHARED, num_hidden_layers=layers)


def deepseek_v32(layers: int) -> PreTrainedConfig:
    """With an index of keys."""
    return deepseek_v3(layers, partial(DeepseekV32Config, index_topk=6, index_n_heads=16, index_head_dim=8))


def qwen3_next(layers: int) -> PreTrainedConfig:
    experts: dict[str, Any] = {"num_experts": 4, "shared_expert_intermediate_size": 16, **_EXPERTS}
    kinds = [*["linear_attention"] * (layers - 1), "full_attention"]
    states: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    states |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return Qwen3NextConfig(**_SHAPE, **experts, **states, num_hidden_layers=layers, layer_types=kinds)


def qwen2(layers: int) -> PreTrainedConfig:
    return Qwen2Config(**_SHAPE, num_hidden_layers=layers)


def qwen3(layers: int) -> PreTrainedConfig:
    return Qwen3Config(**_SHAPE, num_hidden_layers=layers)


@dataclass(frozen=True)
class Written:
    """How a layout is written: prefixes of a depth's layer and of what joins its inputs, names, rules."""

    config: Callable[[int], PreTrainedConfig]
    layer: str
    fusion: str
    names: tuple[str, str, str, str]  # norm of the embedding, norm of the hidden state, projection, last norm
    embedding_first: bool = True
    blank_first: bool = False
    own_head: bool = False
    model_type: str = ""
    promise: Mapping[str, int] = field(default_factory=dict)


_AT, _MIMO_AT, _OWN_AT = "model.layers.{behind}.", "model.mtp_layers.{depth}.", "mtp_layers.{depth}."
_PROMISE = {"num_nextn_predict_layers": 1}
_BEHIND_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_NEXT_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_MIMO_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_BEHIND = Written(glm4_moe, _AT, _AT, _BEHIND_NAMES, blank_first=True, own_head=True, promise=_PROMISE)
_MIMO = Written(qwen2, _MIMO_AT, _MIMO_AT, _MIMO_NAMES, blank_first=True, promise=_PROMISE)
LAYOUTS = {
    "glm4_moe": _BEHIND,
    "deepseek_v3": replace(_BEHIND, config=deepseek_v3),
    "deepseek_v32": replace(_BEHIND, config=deepseek_v32),
    "qwen3_next": Written(qwen3_next, "mtp.layers.{depth}.", "mtp.", _NEXT_NAMES),
    "mimo": replace(_MIMO, embedding_first=False, model_type="mimo"),
    "speculators": Written(qwen3, _OWN_AT, _OWN_AT, _MIMO_NAMES),
}


def _prefix(prefix: str, depth: int) -> str:
    return prefix.format(depth=depth, behind=OWN_LAYERS + depth)


@dataclass
class Depth:
    """One depth by definition: tensors for the joining, a decoder whose only layer is this depth's."""

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    projection: torch.Tensor
    norm: torch.Tensor
    decoder: PreTrainedModel

    def normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm: Any = copy.deepcopy(self.decoder.get_decoder().norm)
        norm.weight = nn.Parameter(weight)
        found: torch.Tensor = norm(hidden)
        return found

    def layer(self, inputs: torch.Tensor) -> torch.Tensor:
        """The last row's output of a causal pass over [rows, hidden]."""
        inner: Any = self.decoder.get_decoder()
        rows = len(inputs)
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        rotation = inner.rotary_emb(inputs[None], position_ids=torch.arange(rows)[None])
        out = inner.layers[0](inputs[None], attention_mask=mask, position_embeddings=rotation)
        found: torch.Tensor = out[0, -1]
        return self.normed(found, self.norm)


@dataclass
class Definition:
    """Multi-token prediction as published: no rows packed, nothing kept."""

    written: Written
    depths: list[Depth]
    embedding: torch.Tensor
    head: torch.Tensor

    @torch.inference_mode()
    def logits(self, path: Sequence[int], features: torch.Tensor) -> torch.Tensor:
        """[V] of the token after `path`, of whose first positions `features` [given, hidden] were computed."""
        inputs: list[list[torch.Tensor]] = [[] for _ in self.depths]
        before: list[torch.Tensor] = []  # each depth's output of the token before
        predicts = 0
        for position in range(1, len(path)):
            embedded = self.embedding[path[position]]
            if self.written.blank_first and position == 1:
                embedded = torch.zeros_like(embedded)
            is_given = position - 1 < len(features)
            known = features[position - 1] if is_given else before[predicts]
            predicts = 0 if is_given else (predicts + 1) % len(self.depths)
            outputs: list[torch.Tensor] = []
            for depth, network in enumerate(self.depths):
                if position <= depth:
                    break
                inputs[depth].append(self._joined(network, embedded, before[depth - 1] if depth else known))
                outputs.append(network.layer(torch.stack(inputs[depth])))
            before = outputs
        return functional.linear(before[predicts], self.head)

    def _joined(self, depth: Depth, embedded: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        pair = [depth.normed(embedded, depth.embedding_norm), depth.normed(known, depth.hidden_norm)]
        ordered = pair if self.written.embedding_first else pair[::-1]
        return functional.linear(torch.cat(ordered), depth.projection)


def write(folder: Path, name: str, depths: int = 1, seed: int = 0) -> Definition:
    """Write a checkpoint in a layout, and say what it is."""
    written = LAYOUTS[name]
    generator = torch.Generator().manual_seed(seed + 77)
    tensors: dict[str, torch.Tensor] = {}
    made: list[Depth] = []
    for depth in range(depths):
        made.append(_random_depth(written, depth, generator))
        inside = _saved(made[-1].decoder, folder / "depth")
        layer, fusion = (_prefix(prefix, depth) for prefix in (written.layer, written.fusion))
        own = "model.layers.0."
        tensors |= {layer + key.removeprefix(own): each for key, each in inside.items() if key.startswith(own)}
        parts = (made[-1].embedding_norm, made[-1].hidden_norm, made[-1].projection, made[-1].norm)
        tensors |= {f"{fusion}{part}.weight": each for part, each in zip(written.names, parts, strict=True)}
    embedding, head = (torch.randn((VOCAB, HIDDEN), generator=generator) for _ in range(2))
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    if written.own_head:
        head = torch.randn((VOCAB, HIDDEN), generator=generator)
        tensors[f"{_prefix(written.fusion, 0)}shared_head.head.weight"] = head
        tensors[f"{_prefix(written.fusion, 0)}embed_tokens.weight"] = embedding.clone()
    save_file(tensors, folder / "model.safetensors")
    config = written.config(OWN_LAYERS).to_dict() | dict.fromkeys(written.promise, depths)
    (folder / "config.json").write_text(json.dumps(config | ({"model_type": "mimo"} if written.model_type else {})))
    return Definition(written, made, embedding, head)


def save_target(folder: Path, name: str, faint: float = FAINT) -> Path:
    """Write a whole target that carries its prediction in a layout, with a tokenizer.

    Its layers add little to the embedding, and the prediction goes on from the token more than from the hidden state:
    so it is right now and then; if they add nothing (`faint` = 0), always.
    """
    written = LAYOUTS[name]
    target = biased(random_model(written.config(OWN_LAYERS), seed=3))
    with torch.no_grad():
        for each, weight in target.named_parameters():
            if any(name in each for name in ("o_proj", "out_proj", "down_proj")):
                weight.mul_(faint)
    save_with_tokenizer(target, folder)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    last, behind = f"model.layers.{OWN_LAYERS - 1}.", _prefix(written.layer, 0)
    own = {key.replace(last, behind): each.clone() for key, each in tensors.items() if key.startswith(last)}
    noise = torch.randn((HIDDEN, HIDDEN), generator=torch.Generator().manual_seed(5))
    pair = (torch.eye(HIDDEN), faint * noise)
    projection = torch.cat(pair if written.embedding_first else pair[::-1], dim=1)
    parts = (torch.ones(HIDDEN), torch.ones(HIDDEN), projection, tensors["model.norm.weight"].clone())
    fusion = _prefix(written.fusion, 0)
    own |= {f"{fusion}{part}.weight": each for part, each in zip(written.names, parts, strict=True)}
    if written.own_head:
        own[f"{fusion}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        own[f"{fusion}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | own, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", **dict.fromkeys(written.promise, 1))
    return folder


def change(folder: Path, keep: Callable[[str], bool], add: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a checkpoint's tensors again, those that are to be kept and some more."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if keep(name)}
    save_file(kept | dict(add or {}), folder / "model.safetensors")


def _random_depth(written: Written, depth: int, generator: torch.Generator) -> Depth:
    # One layer more in front, where the first is another kind than all behind it.
    config: Any = written.config(1)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    if hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["sparse"]
    decoder = biased(random_model(config, depth + 1))
    decoder.requires_grad_(False)
    norms = [1 + 0.3 * torch.randn(HIDDEN, generator=generator) for _ in range(3)]
    projection = torch.randn((HIDDEN, 2 * HIDDEN), generator=generator) * 0.3
    return Depth(norms[0], norms[1], projection, norms[2], decoder)


def _saved(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Tensors as they are published: experts one by one."""
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors
