"""What the training loop asks of a network that it trains, whatever kind of drafter that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.protocol.features import FeatureNeed
from paceline_training.corpus import Row

DEPTH_WEIGHT = 0.8
"""Weight of a depth's loss relative to the depth before. A round reaches a depth only if the one before is accepted.
Medusa's authors weigh heads so (arXiv 2401.10774, §2.2.1: λ_k, the k-th power of .8), and EAGLE-3's their steps."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """What the teacher says of one text.

    Attributes:
        labels: [learned tokens, draft size] log-probabilities of each at the lesson's temperature.
        features: [tokens - 1, layers · hidden] the teacher's hidden states of every token but the last, in the layers
            that the trainee needs.
    """

    row: Row
    labels: torch.Tensor
    features: torch.Tensor

    @property
    def places(self) -> NDArray[np.intp]:
        """Positions of the learned tokens in the text, ascending. Returns [learned tokens]."""
        return np.flatnonzero(self.row.loss_mask[1:]) + 1


@dataclass(frozen=True, eq=False)
class DepthLogits:
    """A trainee's logits for tokens that it would draft at one depth of a round.

    Attributes:
        logits: [positions, draft size].
        label_rows: [positions] indices of their tokens among the lesson's learned tokens; None: all of them.
        weight: weight of this depth in the loss.
        penalty: a sum over positions that is added to the loss, for what a trainee learns beside the labels.
    """

    logits: torch.Tensor
    label_rows: torch.Tensor | None = None
    weight: float = 1.0
    penalty: torch.Tensor | None = None

    def labels_of(self, lesson: Lesson) -> torch.Tensor:
        """The labels of the same tokens: [positions, draft size]."""
        return lesson.labels if self.label_rows is None else lesson.labels[self.label_rows]


class Trainee(Protocol):
    """A network in training; its forward pass is the one that is served."""

    @property
    def need(self) -> FeatureNeed:
        """The hidden states of the teacher that it reads."""

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The ids that it has logits for."""

    @property
    def depth(self) -> int:
        """Tokens of a round that it learns to draft."""

    def weights(self) -> Mapping[str, torch.nn.Parameter]:
        """The trained weights by name."""

    def draft_logits(self, lesson: Lesson) -> Sequence[DepthLogits]:
        """Logits for the learned tokens by depth, with gradients; reports show the first depth's acceptance."""

    def save(self, folder: Path) -> None:
        """Write the trained weights in the layout that their loader reads, without a manifest."""
