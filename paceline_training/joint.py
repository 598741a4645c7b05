"""A drafter and its target trained together, as Medusa-2 is (arXiv 2401.10774, §2.2.2).

The drafter reads the features of the target in training, so its loss moves the target's layers, too. A second loss
keeps them near the original target: KL from its distributions over all ids (self-distillation, §2.3.2). The drafter's
labels are the original's, so text doesn't become easier to draft by changing.

Embedding and head stay frozen, since drafters use the target's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline_training.corpus import Row
from paceline_training.teacher import Teacher, read_row
from paceline_training.text_pass import learned_logits
from paceline_training.trainee import DepthLogits, Lesson, Trainee

TARGET_PREFIX = "target."
"""Prefix of the names of the target's weights, which stand among the drafter's."""


def trained_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model to train. It shares embedding and head with the model, and those stay frozen."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    frozen_weights = {id(weight): weight for module in ends for weight in module.parameters()}
    copied_model = copy.deepcopy(model, dict(frozen_weights))
    for weight in copied_model.parameters():
        weight.requires_grad_(id(weight) not in frozen_weights)
    return copied_model


@dataclass(frozen=True, eq=False)
class JointTrainee:
    """A drafter in training, and the target that it reads.

    Attributes:
        drafter: reads the target's features.
        target: a `trained_copy`.
        original: the target before training, over all its ids.
        drafter_weight: weight of the drafter's loss; the target's distance from its original has weight 1.
    """

    drafter: Trainee
    target: PreTrainedModel
    original: Teacher
    drafter_weight: float
    need: FeatureNeed = NO_FEATURES  # none of the original's: the drafter reads those of the target in training

    @property
    def vocabulary(self) -> DraftVocabulary:  # noqa: D102
        return self.drafter.vocabulary

    @property
    def depth(self) -> int:  # noqa: D102
        return self.drafter.depth

    def target_weights(self) -> dict[str, torch.nn.Parameter]:
        """The target's trained weights by name."""
        parameters = self.target.named_parameters()
        return {TARGET_PREFIX + name: weight for name, weight in parameters if weight.requires_grad}

    def weights(self) -> Mapping[str, torch.nn.Parameter]:  # noqa: D102
        return {**self.drafter.weights(), **self.target_weights()}

    def draft_logits(self, lesson: Lesson) -> list[DepthLogits]:
        """The drafter's logits; the first depth's penalty is the target's distance from its original."""
        logits, features = read_row(self.target, lesson.row, self.drafter.need)
        original_logs = self.original.lesson(lesson.row, 1.0).labels
        distance = divergences(original_logs, log_probabilities(logits, original_logs.shape[1])).sum()
        depths = [
            replace(depth, weight=self.drafter_weight * depth.weight)
            for depth in self.drafter.draft_logits(replace(lesson, features=features))
        ]
        return [replace(depths[0], penalty=distance), *depths[1:]]

    def save(self, folder: Path) -> None:
        """Write the drafter alone; the target is written as a model."""
        self.drafter.save(folder)


def joint_trainee(target: Target, drafter: Trainee, drafter_weight: float) -> JointTrainee:
    """A drafter and its target before their first common step."""
    size = target.tokenizer.vocab_size
    whole = DraftVocabulary(np.arange(size, dtype=np.int32), size)
    original = Teacher(target.model, whole, torch.float32)
    return JointTrainee(drafter, trained_copy(target.model), original, drafter_weight)


def log_probabilities(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Log-probabilities of the first `size` ids: [positions, size]. Logits after them are padding."""
    return torch.log_softmax(logits[:, :size].float(), dim=-1)


def divergences(original_logs: torch.Tensor, current_logs: torch.Tensor) -> torch.Tensor:
    """KL of each position, in nats: [positions]."""
    return (original_logs.exp() * (original_logs - current_logs)).sum(-1)


@dataclass(frozen=True)
class TargetChange:
    """How training changed a target, teacher-forced on held-out text that the original wrote.

    Attributes:
        tokens: number of compared tokens.
        perplexity_before: perplexity of the original at temperature 1.
        perplexity_after: perplexity of the trained target at temperature 1.
        divergence: mean KL from the original's distributions, in nats.
        same_choice: share of the tokens whose most probable id is the same.
    """

    tokens: int
    perplexity_before: float
    perplexity_after: float
    divergence: float
    same_choice: float

    def __str__(self) -> str:
        return (
            f"the target on {self.tokens} held-out tokens: perplexity {self.perplexity_before:.3f} before, "
            f"{self.perplexity_after:.3f} after; KL {self.divergence:.4f} nats a token; "
            f"the same greedy token at {100 * self.same_choice:.1f} %"
        )


@torch.no_grad()
def target_change(original: Target, current: Target, rows: Sequence[Row]) -> TargetChange:
    """Compare a target with its original on texts that have learned tokens."""
    size = original.tokenizer.vocab_size
    parts: list[torch.Tensor] = []
    for row in rows:
        logits = [learned_logits(each.model, row) for each in (original, current)]
        original_logs, current_logs = (log_probabilities(each, size) for each in logits)
        text_ids = torch.from_numpy(row.token_ids[1:][row.loss_mask[1:]]).long().to(original_logs.device)[:, None]
        text_logs = [each.gather(1, text_ids)[:, 0] for each in (original_logs, current_logs)]
        same_choice = (original_logs.argmax(-1) == current_logs.argmax(-1)).float()
        parts.append(torch.stack([*text_logs, divergences(original_logs, current_logs), same_choice]))
    count = sum(part.shape[1] for part in parts)
    means: list[float] = torch.cat(parts, dim=1).double().mean(dim=1).tolist()
    return TargetChange(count, float(np.exp(-means[0])), float(np.exp(-means[1])), means[2], means[3])
