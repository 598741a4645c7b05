"""The tokens that two vocabularies have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.models.token_texts import TokenTexts
from paceline.protocol.errors import VocabularyMismatch

Key = TypeVar("Key", bytes, str)
LEAST_SHARE = 0.01
"""The least share of the target's texts that a draft must have. Two byte-level vocabularies always share 256 bytes,
which can't draft a text: under 1 % of 25,600 ids and more. SmolLM2 has 26 % of Qwen2.5's texts, 32,000 are at most
12 % of 256,000: the common words, of which most text is made."""


@dataclass(frozen=True, eq=False)
class SharedVocabulary:
    """Pairs of ids that stand for the same bytes, or for the special token of the same name.

    Attributes:
        target_ids: ascending, so that ties to the lowest id are the target's own.
        draft_ids: of the same tokens.
        target_size: the target's vocabulary.
        special: how many of them are special tokens.
    """

    target_ids: NDArray[np.int64]  # [size]
    draft_ids: NDArray[np.int64]  # [size]
    target_size: int
    special: int

    @property
    def size(self) -> int:
        """Tokens in common."""
        return int(self.target_ids.size)

    def scatter(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The draft's logits [rows, its vocabulary] → the target's [rows, V], -inf for ids that the draft lacks."""
        wide = np.full((len(logits), self.target_size), -np.inf, np.float32)
        wide[:, self.target_ids] = logits[:, self.draft_ids]
        return wide


def shared_vocabulary(target: TokenTexts, draft: TokenTexts) -> SharedVocabulary:
    """Match two vocabularies; of several ids with the same text, the lowest is matched."""
    texts, special = _pairs(target.texts, draft.texts), _pairs(target.special, draft.special)
    pairs = np.array(sorted(texts + special), np.int64).reshape(-1, 2)
    return SharedVocabulary(pairs[:, 0], pairs[:, 1], target.vocab_size, len(special))


def refuse_strangers(vocabulary: SharedVocabulary, target: TokenTexts, names: tuple[str, str]) -> None:
    """Refuse a draft whose vocabulary covers too little of the target's; `names` are the draft's and the target's.

    Raises:
        VocabularyMismatch: naming how much they have in common, and the least.
    """
    texts, least = vocabulary.size - vocabulary.special, LEAST_SHARE * len(target.texts)
    if texts < max(1, least):
        draft_name, target_name = names
        raise VocabularyMismatch(
            f"drafter model {draft_name!r} has {texts} of the {len(target.texts)} texts of {target_name!r}'s "
            f"vocabulary: must be at least {LEAST_SHARE:.0%}",
            metadata={"field": "tokenizer", "value": str(texts), "limit": f"at least {LEAST_SHARE:.0%}"},
        )


def _pairs(target: Mapping[int, Key], draft: Mapping[int, Key]) -> list[tuple[int, int]]:
    """(target id, draft id) of the texts that both have; empty texts have no partner."""
    draft_ids = {text: i for i, text in sorted(draft.items(), reverse=True)}
    target_ids = {text: i for i, text in sorted(target.items(), reverse=True)}
    return [(i, draft_ids[text]) for text, i in target_ids.items() if text and text in draft_ids]
