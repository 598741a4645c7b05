"""The explanation of a request's plans. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.policy.cycles import Cycles, Strategy, Surroundings
from coordinator.policy.loss_budget import LossBudget
from coordinator.policy.plan import Source
from paceline.costs.acceptance import MAX_DEPTH, survival
from paceline.protocol.explanation import EXPLAINED_ROWS, CandidateExplanation, PlanExplanation
from paceline.sampling.match import Match

EXPLAINED_MATCH = Match(2, (0,) * MAX_DEPTH)
"""The match whose acceptance an explanation gives: two tokens that occurred once."""
_NAMES = {Source.NONE: "none", Source.NGRAM: "ngram", Source.WAIT: "wait", Source.CACHED: "ahead"}


def explain_plan(
    cycles: Cycles,
    around: Surroundings,
    round_counts: Mapping[Strategy, int],
    loss_budget: LossBudget,
) -> PlanExplanation:
    """Explain a planner's present choice.

    Args:
        cycles: of the strategies that it compares.
        around: the other sessions' behaviour.
        round_counts: the number of rounds under each strategy.
        loss_budget: of the request.
    """
    target, draft, stats = cycles.target, cycles.draft, cycles.stats
    return PlanExplanation(
        target_alone_ms=tuple(target.step_ms(rows) for rows in EXPLAINED_ROWS),
        target_beside_ms=tuple(target.step_ms(rows, beside=True) for rows in EXPLAINED_ROWS),
        draft_ms=draft.step_ms(1) if draft is not None else 0.0,
        target_trip_ms=target.send_ms.value,
        draft_trip_ms=draft.wire.value if draft is not None else 0.0,
        target_sessions=target.sessions,
        positions=stats.tokens.positions,
        acceptance=tuple(survival(stats.tokens.chances(MAX_DEPTH))),
        ngram_acceptance=tuple(stats.texts.ngrams.prefix_chances(EXPLAINED_MATCH, MAX_DEPTH)),
        candidates=(*_model_candidates(cycles, around, round_counts), _match_candidate(cycles, round_counts)),
        account_ms=loss_budget.loss_ms,
        account_bound_ms=loss_budget.limit_ms,
    )


def _model_candidates(
    cycles: Cycles, around: Surroundings, round_counts: Mapping[Strategy, int]
) -> list[CandidateExplanation]:
    """The candidates without matches. A cached proposal of any round counts as drafted ahead.

    Target-only is one token a round here, since matches are a candidate of their own.
    """
    counts: dict[tuple[Source, int], int] = {}
    for strategy, rounds in round_counts.items():
        counts[strategy.source, strategy.depth] = counts.get((strategy.source, strategy.depth), 0) + rounds
    return [
        CandidateExplanation(
            _NAMES[strategy.source],
            strategy.depth,
            cycle.tokens if strategy.depth else 1.0,
            cycle.ms,
            counts.get((strategy.source, strategy.depth), 0),
        )
        for strategy, cycle in cycles.all(around).items()
    ]


def _match_candidate(cycles: Cycles, round_counts: Mapping[Strategy, int]) -> CandidateExplanation:
    """The candidate of matches. They differ in length and worth, so it has measured means of their rounds."""
    copies = cycles.stats.texts
    rounds = sum(count for strategy, count in round_counts.items() if strategy.source is Source.NGRAM)
    proposed, tokens, ms = round(copies.proposed.value), copies.tokens.value, copies.ms.value
    return CandidateExplanation(_NAMES[Source.NGRAM], proposed, tokens, ms, rounds)
