"""Positions with stated chances, as if two passes had found them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline_lab.predict.figures import RANKS
from paceline_lab.predict.positions import ENDLESS, DrafterPositions


def made_positions(accepted: Sequence[float], *further: float, offered: int = ENDLESS) -> DrafterPositions:
    """Positions whose first rank is right with the given chances, and each further rank with more, as far as told."""
    count = len(accepted)
    reach = np.zeros((count, 1, RANKS))
    reach[:, 0, 0] = accepted
    for rank in range(1, RANKS):
        reach[:, 0, rank] = further[min(rank, len(further)) - 1] if further else reach[:, 0, 0]
    ids, figures = np.ones((3, count), np.int32), np.zeros((5, count))
    return DrafterPositions(reach, np.full(count, offered, np.int32), *ids, *figures)
