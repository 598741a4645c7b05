"""Says why a request was drafted for as it was. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.policy.account import Account
from coordinator.policy.cycles import Cycles, Surroundings, Way
from coordinator.policy.plan import Source
from coordinator.policy.seen import MAX_DEPTH, survival
from paceline.protocol.explanation import EXPLAINED_ROWS, CandidateExplanation, PlanExplanation
from paceline.sampling.match import Match

EXPLAINED_MATCH = Match(2, (0,) * MAX_DEPTH)
"""Of whose tokens an explanation says how often they are right: a match of two tokens that occurred once."""
_NAMES = {Source.NONE: "none", Source.NGRAM: "ngram", Source.WAIT: "wait", Source.CACHED: "ahead"}


def explained(
    cycles: Cycles, around: Surroundings, chosen: Mapping[Way, int], account: Account, positions: int
) -> PlanExplanation:
    """What a planner knows now.

    Args:
        cycles: the ways that it compares.
        around: what the others do.
        chosen: rounds of each way.
        account: of the request.
        positions: committed positions whose shadow has come.
    """
    target, draft, seen = cycles.target, cycles.draft, cycles.seen
    return PlanExplanation(
        target_alone_ms=tuple(target.step_ms(rows) for rows in EXPLAINED_ROWS),
        target_beside_ms=tuple(target.step_ms(rows, beside=True) for rows in EXPLAINED_ROWS),
        draft_ms=draft.step_ms(1) if draft is not None else 0.0,
        target_trip_ms=target.sent.value,
        draft_trip_ms=draft.wire.value if draft is not None else 0.0,
        target_sessions=target.sessions,
        positions=positions,
        acceptance=tuple(survival(seen.chances(MAX_DEPTH))),
        ngram_acceptance=tuple(seen.texts.ngrams.reached(EXPLAINED_MATCH, MAX_DEPTH)),
        candidates=(*_modelled(cycles, around, chosen), _copied(cycles, chosen)),
        account_ms=account.over_ms,
        account_bound_ms=account.limit_ms,
    )


def _modelled(cycles: Cycles, around: Surroundings, chosen: Mapping[Way, int]) -> list[CandidateExplanation]:
    """A cached proposal of any round counts as drafted ahead.

    Target-only is its one token: what matches bring to rounds without a model is a way of its own here.
    """
    counts: dict[tuple[Source, int], int] = {}
    for way, rounds in chosen.items():
        counts[way.source, way.depth] = counts.get((way.source, way.depth), 0) + rounds
    return [
        CandidateExplanation(
            _NAMES[cycle.way.source],
            cycle.way.depth,
            cycle.tokens if cycle.way.depth else 1.0,
            cycle.ms,
            counts.get((cycle.way.source, cycle.way.depth), 0),
        )
        for cycle in cycles.all(around)
    ]


def _copied(cycles: Cycles, chosen: Mapping[Way, int]) -> CandidateExplanation:
    """Matches differ in length and worth: what their rounds gave and took tells more than what one should."""
    copies = cycles.seen.texts.copies
    rounds = sum(count for way, count in chosen.items() if way.source is Source.NGRAM)
    proposed, tokens, ms = round(copies.proposed.value), copies.tokens.value, copies.ms.value
    return CandidateExplanation(_NAMES[Source.NGRAM], proposed, tokens, ms, rounds)
