"""Which texts are known and which are new: two ways to divide, each used both ways round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.predictors.reading import StudiedText

NEW_PROMPTS, NEW_KINDS = "new prompts", "new kinds of traffic"
"""Half of each kind's prompts are new, or all prompts of half of the kinds."""


def folds_of(texts: Sequence[StudiedText], scheme: str) -> NDArray[np.intp]:
    """[texts] 0 or 1; those of the other fold are known to each."""
    if scheme == NEW_PROMPTS:
        return np.array([text.number % 2 for text in texts])
    kinds = list(dict.fromkeys(text.kind for text in texts))
    return np.array([kinds.index(text.kind) % 2 for text in texts])
