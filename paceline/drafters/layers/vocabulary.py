"""A draft's own, smaller vocabulary: some of the target's ids, in ascending order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.errors import require

ABSENT = -1


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Maps between draft ids [0, size) and target ids [0, target_size).

    Attributes:
        d2t: target id of each draft id, ascending, so that ties to the lowest id are the same in both.
        target_size: the target's vocabulary.
    """

    d2t: NDArray[np.int32]  # [size]
    target_size: int

    def __post_init__(self) -> None:
        ascending = bool(self.d2t.size) and bool((np.diff(self.d2t) > 0).all())
        require(ascending, "d2t", self.d2t[:8].tolist(), "ascending ids, at least 1")
        inside = self.d2t[0] >= 0 and self.d2t[-1] < self.target_size
        require(bool(inside), "d2t", int(self.d2t[-1]), f"ids in [0, {self.target_size})")

    @property
    def size(self) -> int:
        """Draft ids."""
        return int(self.d2t.size)

    @property
    def t2d(self) -> NDArray[np.int32]:
        """Draft id of each target id, `ABSENT` where there is none. Returns [target_size]."""
        inverse = np.full(self.target_size, ABSENT, np.int32)
        inverse[self.d2t] = np.arange(self.size, dtype=np.int32)
        return inverse

    def scatter(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Draft logits [rows, size] → target logits [rows, target_size], -inf for ids that the draft lacks."""
        wide = np.full((len(logits), self.target_size), -np.inf, np.float32)
        wide[:, self.d2t] = logits
        return wide
