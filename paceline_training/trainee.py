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
"""Of a depth's loss beside that of the one before, without whose acceptance no round reaches it: as Medusa's authors
weigh heads (arXiv 2401.10774, §2.2.1: λ_k, the k-th power of .8), and EAGLE-3's steps."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """What the teacher says of one text.

    Attributes:
        labels: [learned tokens, draft size] log-probabilities of each at the lesson's temperature.
        features: [tokens - 1, layers · hidden] what it computed of each token but the last, layers joined as needed.
    """

    row: Row
    labels: torch.Tensor
    features: torch.Tensor

    @property
    def places(self) -> NDArray[np.intp]:
        """Where each learned token stands in the text, ascending. Returns [learned tokens]."""
        return np.flatnonzero(self.row.learned[1:]) + 1


@dataclass(frozen=True, eq=False)
class DepthLogits:
    """A trainee's logits for tokens that it would draft at one depth of a round.

    Attributes:
        logits: [positions, draft size].
        learned: [positions] which of the lesson's learned tokens they are for; None: all.
        weight: share of this depth in the loss.
        penalty: added to the loss, a sum over positions; what a trainee learns beside the labels.
    """

    logits: torch.Tensor
    learned: torch.Tensor | None = None
    weight: float = 1.0
    penalty: torch.Tensor | None = None

    def labels_of(self, lesson: Lesson) -> torch.Tensor:
        """The labels of the same tokens: [positions, draft size]."""
        return lesson.labels if self.learned is None else lesson.labels[self.learned]


class Trainee(Protocol):
    """A network in training; its forward pass is the one that is served."""

    @property
    def need(self) -> FeatureNeed:
        """What of the teacher's pass it reads."""

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The ids that it has logits for."""

    @property
    def depth(self) -> int:
        """Tokens of a round that it learns to draft."""

    def weights(self) -> Mapping[str, torch.nn.Parameter]:
        """Name → weight of all that is trained and kept."""

    def drafted(self, lesson: Lesson) -> Sequence[DepthLogits]:
        """What it would draft for the learned tokens, with gradients; the first depth is the running figure."""

    def save(self, folder: Path) -> None:
        """Write what is trained, in the layout that its loader reads; no manifest."""
