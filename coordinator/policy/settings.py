"""The drafting settings of requests that leave them open."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.costs.cycle import FAN_OUT
from paceline.protocol.features import MAX_KEPT_FEATURE_BYTES, FeatureType
from paceline.protocol.proposal import AUTO

LEASE = 16
"""Rounds to lease where nothing will be proposed for as long; a setting may be lower."""
MAX_PREFETCHED = 24
"""Most proposals that are considered for prefetching for one round's outcomes."""


@dataclass(frozen=True)
class DraftingSettings:
    """The drafting settings of requests that leave them open.

    Attributes:
        drafter: `auto`, `ngram`, a drafter of the draft service, or `none`.
        num_draft_tokens: tokens to propose; None: the planner chooses each round.
        fan_out: next tokens per accepted node to draft for while a round is verified; 0: none.
        lease: most rounds that the target may start by itself, where nothing is proposed; 0: none.
        max_prefetched: most proposals to prefetch for the outcomes of one round; 0: none.
        feature_dtype: of the hidden states that the target sends to a drafter.
        max_feature_bytes: most bytes of them that are kept for a draft session that is opened later.
    """

    drafter: str = AUTO
    num_draft_tokens: int | None = None
    fan_out: int = FAN_OUT
    lease: int = LEASE
    max_prefetched: int = MAX_PREFETCHED
    feature_dtype: FeatureType = FeatureType.FLOAT16
    max_feature_bytes: int = MAX_KEPT_FEATURE_BYTES
