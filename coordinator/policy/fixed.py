"""The plan of a request with a fixed number of tokens to propose: that many whenever a drafter has them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.policy.plan import Plan, Source
from paceline.protocol.proposal import Proposal
from paceline.sampling.match import Match

SURE_MATCH = 5
"""Length from which a match is preferred to the model."""


def fixed_plan(
    k: int, match: Match | None, cached_proposal: Proposal | None, widths: Sequence[int], *, fan_out: int, model: bool
) -> Plan:
    """The plan of the next round.

    Args:
        k: tokens to propose.
        match: the best n-gram match, or the prediction's.
        cached_proposal: the proposal drafted for this outcome before it was known.
        widths: of a static tree.
        fan_out: next tokens per accepted node to draft for during the round.
        model: whether a model may be asked.
    """
    if match is not None and (not model or match.length >= SURE_MATCH):
        source = Source.NGRAM
    elif cached_proposal is not None:
        source = Source.CACHED
    else:
        source = Source.WAIT if model else Source.NONE
    nodes = k if not widths or source is Source.NGRAM else 0
    cached_nodes = len(cached_proposal) if cached_proposal is not None else 0
    return Plan(source, cached_nodes if source is Source.CACHED else nodes, k, fan_out=fan_out, branch_depth=k)
