"""The plan of a request that names how many tokens to propose: so many whenever a drafter has them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.policy.plan import Plan, Source
from paceline.protocol.proposal import Proposal
from paceline.sampling.match import Match

SURE_MATCH = 5
"""Length from which a match is preferred to the model."""


def fixed_plan(
    k: int, match: Match | None, cached: Proposal | None, widths: Sequence[int], *, fan_out: int, model: bool
) -> Plan:
    """What the next round should do.

    Args:
        k: tokens to propose.
        match: the best n-gram match, or the prediction's.
        cached: what was drafted for this outcome before it was known.
        widths: of a static tree.
        fan_out: next tokens per accepted node to draft for meanwhile.
        model: whether a model may be asked.
    """
    if match is not None and (not model or match.length >= SURE_MATCH):
        source = Source.NGRAM
    elif cached is not None:
        source = Source.CACHED
    else:
        source = Source.WAIT if model else Source.NONE
    nodes = k if not widths or source is Source.NGRAM else 0
    held = len(cached) if cached is not None else 0
    return Plan(source, held if source is Source.CACHED else nodes, k, fan_out=fan_out, branch_depth=k)
