"""The drafting settings of requests that leave them open, and those of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.policy.plan import Plan, Source
from coordinator.text.sequence import GenerationTask
from paceline.costs.acceptance import FAN_OUT
from paceline.protocol.draft import DraftBudget
from paceline.protocol.features import MAX_KEPT_FEATURE_BYTES, FeatureType
from paceline.protocol.proposal import AUTO, NGRAM, NONE, Acceptance, Proposal
from paceline.sampling.match import HALF_TRUSTED, Match

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


@dataclass(frozen=True)
class RequestedDrafting:
    """What one request asks for.

    Attributes:
        drafter: its name, as in `DraftingSettings`.
        tokens: to propose each round; None: the planner chooses.
        widths: of a static tree.
        coupled: whether proposals may be trees, and may be prefetched.
        uses_model: whether a draft service may be asked.
        fan_out, lease, max_prefetched: as in `DraftingSettings`.
    """

    drafter: str
    tokens: int | None
    widths: tuple[int, ...]
    coupled: bool
    uses_model: bool
    fan_out: int
    lease: int
    max_prefetched: int

    @classmethod
    def of(cls, task: GenerationTask, settings: DraftingSettings, *, has_service: bool) -> RequestedDrafting:
        """What a request asks for, or else what is set; `has_service`: whether there are draft services."""
        speculation = task.speculation
        drafter = NONE if speculation.off else speculation.drafter or settings.drafter
        tokens = settings.num_draft_tokens if speculation.num_draft_tokens is None else speculation.num_draft_tokens
        uses_model = has_service and drafter not in (NGRAM, NONE) and tokens != 0
        coupled = task.acceptance is Acceptance.COUPLED
        may_prefetch = coupled and drafter != NONE
        return cls(
            drafter,
            tokens,
            speculation.tree_widths,
            coupled,
            uses_model,
            settings.fan_out if uses_model else 0,
            settings.lease,
            settings.max_prefetched if may_prefetch else 0,
        )

    @property
    def is_off(self) -> bool:
        """Whether nothing is proposed at all."""
        return self.drafter == NONE

    @property
    def searches(self) -> bool:
        """Whether the text so far is searched for matches."""
        return self.drafter in (NGRAM, AUTO)


def fixed_plan(
    k: int, match: Match | None, cached_proposal: Proposal | None, widths: Sequence[int], *, fan_out: int, model: bool
) -> Plan:
    """The plan of a request with a fixed number of tokens: that many whenever a drafter has them.

    A match that is more than half trusted is preferred to a model.

    Args:
        k: tokens to propose.
        match: the best n-gram match, or the prediction's.
        cached_proposal: the proposal drafted for this outcome before it was known.
        widths: of a static tree.
        fan_out: next tokens per accepted node to draft for during the round.
        model: whether a model may be asked.
    """
    if match is not None and (not model or match.length > HALF_TRUSTED):
        source = Source.NGRAM
    elif cached_proposal is not None:
        source = Source.CACHED
    else:
        source = Source.WAIT if model else Source.NONE
    nodes = k if not widths or source is Source.NGRAM else 0
    cached_nodes = len(cached_proposal) if cached_proposal is not None else 0
    ahead = DraftBudget(k, fan_out=fan_out)
    return Plan(source, cached_nodes if source is Source.CACHED else nodes, k, ahead=ahead)
