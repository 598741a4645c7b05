"""Multi-token prediction for a target that carries none, before its first step and as speculators writes it.

One depth, applied to its own output for deeper tokens: a layer like the target's last, which it begins as. Embedding
and head are the target's own, neither trained nor written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.heads.mtp import MtpForm, MtpNetwork
from paceline.drafters.layers.student import Target, build_student
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.weights import layers_of
from paceline.protocol.features import FINAL, FeatureNeed
from paceline_training.published import speculators_facts, write_published
from paceline_training.starts import begin_as_last_input
from paceline_training.unrolled import RecurrentTrainee

_PUBLISHED_NAMES = {
    "decoder.model.layers.0.": "mtp_layers.0.",
    "decoder.model.norm.": "mtp_layers.0.final_layernorm.",
    "fusions.0.embedding_norm.": "mtp_layers.0.token_layernorm.",
    "fusions.0.hidden_norm.": "mtp_layers.0.hidden_layernorm.",
    "fusions.0.projection.": "mtp_layers.0.input_proj.",
}
"""From what the network calls its parts to what speculators does."""


@dataclass(frozen=True, eq=False)
class FirstDepth:
    """The first depth of a network as a `RecurrentNetwork`."""

    network: MtpNetwork

    def project(self, features: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return features

    def __call__(self, token_ids: torch.Tensor, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `RecurrentNetwork`'s; the network counts the positions of the tokens themselves."""
        own = positions[0] + 1
        return self.network.run(0, self.network.embed(token_ids[0], own), inputs[0], own)[None]

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.network.logits(outputs)


def mtp_trainee(target: Target, vocabulary: DraftVocabulary, steps: int) -> RecurrentTrainee:
    """One depth, its ids the target's."""
    student = build_student(target.model, (len(layers_of(target.model)) - 1,), vocabulary)
    network = MtpNetwork(student, MtpForm())
    fusion: Any = network.fusions[0]
    begin_as_last_input(fusion.projection)  # the feature as it is
    own = {_published_name(name): weight for name, weight in network.named_parameters() if weight.requires_grad}
    facts = {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": target.model.config.get_text_config().to_dict(),
        **speculators_facts("mtp", target, steps),
    }

    def write(folder: Path, weights: Mapping[str, torch.nn.Parameter]) -> None:
        write_published(folder, weights, facts)

    return RecurrentTrainee(FirstDepth(network), own, write, vocabulary, FeatureNeed((FINAL,)), steps)


def _published_name(name: str) -> str:
    """The published name of one of the network's parameters."""
    part = next(part for part in _PUBLISHED_NAMES if name.startswith(part))
    return _PUBLISHED_NAMES[part] + name.removeprefix(part)
