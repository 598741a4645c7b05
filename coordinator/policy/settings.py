"""What requests get that don't choose for themselves how they are drafted for."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.features import MAX_KEPT_FEATURE_BYTES, FeatureType
from paceline.protocol.proposal import AUTO

LEASE = 16
"""Rounds to lease where nothing will be proposed for as long; a setting may say less."""
PREFETCHED = 24
"""Proposals to leave with the target for the outcomes of one round; no others are considered."""


@dataclass(frozen=True)
class DraftingSettings:
    """What requests get that don't choose for themselves.

    Attributes:
        drafter: `auto`, `ngram`, a drafter of the draft service, or `none`.
        num_draft_tokens: tokens to propose; None: the planner chooses each round.
        fan_out: next tokens per accepted node to draft for while a round is verified; 0: none.
        lease: most rounds that the target may start by itself, where nothing is proposed; 0: none.
        max_prefetched: most proposals to leave with the target for the outcomes of one round; 0: none.
        feature_dtype: how the target writes hidden states for a drafter that reads them.
        max_feature_bytes: of these, kept of one request for a draft session that is opened later.
    """

    drafter: str = AUTO
    num_draft_tokens: int | None = None
    fan_out: int = 4
    lease: int = LEASE
    max_prefetched: int = PREFETCHED
    feature_dtype: FeatureType = FeatureType.FLOAT16
    max_feature_bytes: int = MAX_KEPT_FEATURE_BYTES
