"""Which of the target's ids a draft gets: the most frequent ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.drafters.layers.vocabulary import ABSENT, DraftVocabulary
from paceline.protocol.errors import require
from paceline_training.corpus import Role, Row


def choose_vocabulary(
    rows: Sequence[Row], size: int, target_size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """The `size` most frequent ids of what the model wrote; ends of text always, then low ids fill the rest.

    Low ids are a tokenizer's special tokens, bytes and earliest merges, which are its most common ones.
    """
    require(1 <= size <= target_size, "draft_vocab", size, f"in [1, {target_size}]")
    counts = np.zeros(target_size, np.int64)
    for row in rows:
        np.add.at(counts, row.token_ids[row.roles != Role.FORCED], 1)
    counts[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-counts, kind="stable")  # equals: the lowest id first
    return DraftVocabulary(np.sort(order[:size]).astype(np.int32), target_size)


def coverage(rows: Sequence[Row], vocabulary: DraftVocabulary) -> float:
    """Share of the learned tokens that the vocabulary holds."""
    tokens = np.concatenate([row.token_ids[row.loss_mask] for row in rows])
    return float((vocabulary.t2d[tokens] != ABSENT).mean())
