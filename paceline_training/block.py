"""A block drafter before its first step, and as speculators writes it (DFlash, arXiv 2602.06036).

A round is one pass: the text's last token and masked places behind it, over the target's features of the tokens
before. Training begins a block at every token: place i of the block predicts the token i + 1 positions after its
first. Embedding and head are the target's own, neither trained nor written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from paceline.drafters.heads.block_network import Attend, BlockForm, BlockNetwork, Sight, block_attention
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.protocol.features import FeatureNeed
from paceline_training.published import offset_maps, speculators_facts, write_published
from paceline_training.starts import (
    begin_as_last_input,
    begin_as_last_layer,
    begin_as_last_norm,
    borrow,
    feature_inputs,
    layer_keys,
)
from paceline_training.trainee import DEPTH_WEIGHT, DepthLogits, Lesson

FIRST_ROOT = 1
"""The first token that has features before it."""


@dataclass(frozen=True, eq=False)
class BlockTrainee:
    """A block drafter in training; `facts` is its published configuration."""

    network: BlockNetwork
    vocabulary: DraftVocabulary
    need: FeatureNeed
    facts: Mapping[str, Any]

    @property
    def depth(self) -> int:  # noqa: D102
        return self.network.form.size

    def weights(self) -> Mapping[str, torch.nn.Parameter]:  # noqa: D102
        return {name: weight for name, weight in self.network.named_parameters() if weight.requires_grad}

    def draft_logits(self, lesson: Lesson) -> list[DepthLogits]:  # noqa: D102
        size, places = self.network.form.size, lesson.places
        start = max(FIRST_ROOT, int(places[0]) - size) if places.size else FIRST_ROOT
        roots = torch.arange(start, int(places.max(initial=start)), device=lesson.features.device)
        tokens = torch.from_numpy(lesson.row.token_ids.astype(np.int64)).to(roots.device)
        attend = blocks_of_text(self.network, lesson.features, roots)
        outputs = self.network.outputs(tokens[roots], roots, attend)  # [roots, size, hidden]
        depths: list[DepthLogits] = []
        for depth in range(size):
            label_rows = np.flatnonzero(places - 1 - depth >= start)
            rows = torch.from_numpy(places[label_rows] - 1 - depth - start).to(roots.device)
            logits = self.network.logits(outputs[rows, depth])[:, : self.vocabulary.size]
            depths.append(DepthLogits(logits, torch.from_numpy(label_rows).to(roots.device), DEPTH_WEIGHT**depth))
        return depths

    def save(self, folder: Path) -> None:  # noqa: D102
        write_published(folder, self.weights(), self.facts, offset_maps(self.vocabulary, self.facts["vocab_size"]))


def block_trainee(target: Target, vocabulary: DraftVocabulary, size: int) -> BlockTrainee:
    """A block drafter of one layer over three layers' features.

    Raises:
        InvalidInput: a target of fewer than three layers.
    """
    text: Any = target.model.config.get_text_config()
    heads = {"head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads}
    config: Any = Qwen3Config(
        **layer_keys(target.model) | heads | {"num_hidden_layers": 1}, tie_word_embeddings=False
    )
    inputs = feature_inputs(target)
    mask = min(target.tokenizer.eos_token_ids, default=0)  # never the first token of a block that is served
    form = BlockForm(size, mask, from_first=True, features=len(inputs), sights=(Sight(),))
    network = BlockNetwork(config, vocabulary.size, form)
    borrow(network, target.model, vocabulary)
    begin_as_last_layer(network.layers[0], target.model)
    begin_as_last_norm(network.norm, target.model)
    begin_as_last_input(network.fc)  # the highest layer's feature as it is
    facts = {
        "architectures": ["DFlashDraftModel"],
        "block_size": size,
        "mask_token_id": mask,
        "sample_from_anchor": True,
        "aux_hidden_state_layer_ids": list(inputs),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": vocabulary.size,
        "transformer_layer_config": config.to_dict(),
        **speculators_facts("dflash", target, size),
    }
    return BlockTrainee(network, vocabulary, FeatureNeed(tuple(each - 1 for each in inputs)), facts)


def blocks_of_text(network: BlockNetwork, features: torch.Tensor, first: torch.Tensor) -> Attend:
    """Attention of blocks that begin at many places of one text, each over the text before it.

    Args:
        network: the blocks' network.
        features: [rows, layers of the target · hidden], of the text's positions from 0 on.
        first: [blocks], the positions at which blocks begin.
    """
    context_positions = torch.arange(len(features), device=features.device)
    pairs = network.context(features, context_positions)
    context = pairs.permute(1, 2, 3, 0, 4)  # [layers, 2, kv_heads, rows, head_dim]
    block_positions = first[:, None] + torch.arange(network.form.size, device=first.device)
    positions = torch.cat((context_positions.expand(len(first), -1), block_positions), dim=1)  # [blocks, rows + size]
    earlier = (context_positions < first[:, None])[:, None]  # [blocks, 1, rows]
    visible = torch.cat((earlier, torch.ones_like(block_positions, dtype=torch.bool)[:, None]), dim=2)

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        parts = zip(context[layer], (keys, values), strict=True)
        joint_keys, joint_values = (
            torch.cat((each.expand(len(first), -1, -1, -1), own), dim=2) for each, own in parts
        )
        sight = network.form.sights[layer].mask(block_positions, positions)
        mask = visible.expand(-1, network.form.size, -1) if sight is None else visible & sight
        return block_attention(queries, joint_keys, joint_values, mask[:, None])

    return attend
