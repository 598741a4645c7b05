"""Medusa's heads before their first step, and as vLLM reads them.

Each head is residual blocks in front of the target's own head, of which it has the rows of the draft's ids; that head
is neither trained nor written. At first every head predicts the next token as the target does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.drafters.heads.lookahead import MedusaHeads
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.cpu.linear import frozen_linear
from paceline.protocol.features import FeatureNeed
from paceline_training.published import write_published
from paceline_training.trainee import DEPTH_WEIGHT, DepthLogits, Lesson

LAYERS = 1
"""Residual blocks of a head, as in the paper."""


@dataclass(frozen=True, eq=False)
class MedusaTrainee:
    """Heads in training."""

    network: MedusaHeads
    vocabulary: DraftVocabulary
    target: str

    @property
    def need(self) -> FeatureNeed:  # noqa: D102
        return self.network.need

    @property
    def depth(self) -> int:  # noqa: D102
        return self.network.heads

    def weights(self) -> Mapping[str, torch.nn.Parameter]:
        """The weights by vLLM's names: `blocks.HEAD.layers.LAYER.weight`."""
        parameters = ((name.split("."), weight) for name, weight in self.network.blocks.named_parameters())
        return {f"blocks.{head}.layers.{layer}.{kind}": weight for (head, layer, _, kind), weight in parameters}

    def draft_logits(self, lesson: Lesson) -> list[DepthLogits]:
        """Head d predicts the token d + 2 positions after the one whose feature it reads."""
        depths: list[DepthLogits] = []
        for head in range(self.network.heads):
            label_rows = np.flatnonzero(lesson.places >= head + 2)
            index = torch.from_numpy(label_rows).to(lesson.features.device)
            feature_rows = torch.from_numpy(lesson.places[label_rows] - head - 2).to(lesson.features.device)
            depths.append(DepthLogits(self.network(lesson.features[feature_rows], head), index, DEPTH_WEIGHT**head))
        return depths

    def save(self, folder: Path) -> None:  # noqa: D102
        hidden, vocab_size = len(self.network.empty_feature), self.vocabulary.target_size
        facts = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": hidden,
            "vocab_size": vocab_size,
            "truncated_vocab_size": self.vocabulary.size,
            "num_heads": self.network.heads,
            "num_hidden_layers": LAYERS,
            "medusa_fc_bias": True,
            "original_lm_head": True,
            "base_model_name_or_path": self.target,
        }
        is_reduced = self.vocabulary.size < vocab_size
        maps = {"token_map": torch.from_numpy(self.vocabulary.d2t.astype(np.int64))} if is_reduced else {}
        write_published(folder, self.weights(), facts, maps)


def medusa_trainee(target: Target, vocabulary: DraftVocabulary, heads: int) -> MedusaTrainee:
    """Heads in front of the target's own."""
    head: Any = target.model.get_output_embeddings()
    ids = torch.from_numpy(vocabulary.d2t).long()
    bias = None if head.bias is None else head.bias.detach()[ids]
    own = frozen_linear(head.weight.detach()[ids].clone(), bias)
    hidden = target.model.config.get_text_config().hidden_size
    network = MedusaHeads(hidden, LAYERS, [own] * heads, ids=ids, vocab_size=vocabulary.target_size)
    return MedusaTrainee(network, vocabulary, target.name)
