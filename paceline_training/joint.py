"""A drafter and its target trained together, as Medusa-2 is (arXiv 2401.10774, §2.2.2).

The drafter reads the features of the target as it is by now, so its loss moves the target's layers, too. What holds
them is the target as it was: KL from its distributions over all ids (self-distillation, §2.3.2). The drafter's labels
are those of the target as it was, so no text is easier to draft for being another.

Embedding and head stay frozen: drafters use the target's own, and learn in front of them.
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
"""Of the names of the target's weights, beside the drafter's."""


def trained_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose weights but embedding and head are trained; those two are the model's own."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    frozen = {id(weight): weight for module in ends for weight in module.parameters()}
    changed = copy.deepcopy(model, dict(frozen))
    for weight in changed.parameters():
        weight.requires_grad_(id(weight) not in frozen)
    return changed


@dataclass(frozen=True, eq=False)
class JointTrainee:
    """A drafter in training, and the target that it reads.

    Attributes:
        drafter: reads the target's features.
        target: a `trained_copy`.
        original: what the target said before, over all its ids.
        drafter_weight: of the drafter's loss beside 1, that of the distance from the original.
    """

    drafter: Trainee
    target: PreTrainedModel
    original: Teacher
    drafter_weight: float
    need: FeatureNeed = NO_FEATURES  # of the original's pass: it reads the target in training instead

    @property
    def vocabulary(self) -> DraftVocabulary:  # noqa: D102
        return self.drafter.vocabulary

    @property
    def depth(self) -> int:  # noqa: D102
        return self.drafter.depth

    def target_weights(self) -> dict[str, torch.nn.Parameter]:
        """Name → weight of what is trained of the target."""
        named = self.target.named_parameters()
        return {TARGET_PREFIX + name: weight for name, weight in named if weight.requires_grad}

    def weights(self) -> Mapping[str, torch.nn.Parameter]:  # noqa: D102
        return {**self.drafter.weights(), **self.target_weights()}

    def drafted(self, lesson: Lesson) -> list[DepthLogits]:
        """As the drafter's, the distance from the original as the first depth's penalty."""
        logits, features = read_row(self.target, lesson.row, self.drafter.need)
        was = self.original.lesson(lesson.row, 1.0).labels
        distance = divergences(was, log_probabilities(logits, was.shape[1])).sum()
        depths = [
            replace(depth, weight=self.drafter_weight * depth.weight)
            for depth in self.drafter.drafted(replace(lesson, features=features))
        ]
        return [replace(depths[0], penalty=distance), *depths[1:]]

    def save(self, folder: Path) -> None:
        """The drafter's own; the target is written as a model."""
        self.drafter.save(folder)


def joint_trainee(target: Target, drafter: Trainee, drafter_weight: float) -> JointTrainee:
    """A drafter and its target before their first common step."""
    size = target.tokenizer.vocab_size
    whole = DraftVocabulary(np.arange(size, dtype=np.int32), size)
    original = Teacher(target.model, whole, torch.float32)
    return JointTrainee(drafter, trained_copy(target.model), original, drafter_weight)


def log_probabilities(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Of ids that are real: [positions, size]; what is behind them is padding."""
    return torch.log_softmax(logits[:, :size].float(), dim=-1)


def divergences(was: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """KL of each position, in nats: [positions]."""
    return (was.exp() * (was - now)).sum(-1)


@dataclass(frozen=True)
class TargetChange:
    """What the target's text lost by training, teacher-forced on held-out text that it wrote before.

    Attributes:
        tokens: that were compared.
        perplexity_before: of the target as it was, at temperature 1.
        perplexity_after: of the target as it is.
        divergence: mean KL in nats from what it said before.
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
def target_change(before: Target, after: Target, rows: Sequence[Row]) -> TargetChange:
    """Compare a target with what it was on texts with something learned."""
    size = before.tokenizer.vocab_size
    parts: list[torch.Tensor] = []
    for row in rows:
        was, now = (log_probabilities(learned_logits(each.model, row), size) for each in (before, after))
        written = torch.from_numpy(row.token_ids[1:][row.learned[1:]]).long().to(was.device)[:, None]
        said = [each.gather(1, written)[:, 0] for each in (was, now)]
        same = (was.argmax(-1) == now.argmax(-1)).float()
        parts.append(torch.stack([*said, divergences(was, now), same]))
    count = sum(part.shape[1] for part in parts)
    means: list[float] = torch.cat(parts, dim=1).double().mean(dim=1).tolist()
    return TargetChange(count, float(np.exp(-means[0])), float(np.exp(-means[1])), means[2], means[3])
