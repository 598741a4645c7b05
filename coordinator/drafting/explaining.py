"""The explanation of a request's plans, and what the requests of a target do together. Pure."""

from __future__ import annotations

from dataclasses import replace

from coordinator.policy.cycles import Cycles, Strategy
from coordinator.policy.group import Group
from coordinator.policy.plan import Source
from coordinator.policy.planner import RequestPlanner
from coordinator.policy.round_times import TargetTimes
from paceline.costs.acceptance import MAX_DEPTH, survival
from paceline.costs.cycle import Cycle
from paceline.costs.goodput import FIRST_PAUSE, MARGIN, Mode
from paceline.protocol.explanation import (
    EXPLAINED_ROWS,
    CandidateExplanation,
    GroupReport,
    ModeReport,
    PlanExplanation,
)
from paceline.sampling.match import Match

EXPLAINED_MATCH = Match(2, (0,) * MAX_DEPTH)
"""The match whose acceptance an explanation gives: two tokens that occurred once."""
_NAMES = {Source.NONE: "none", Source.NGRAM: "ngram", Source.WAIT: "wait", Source.CACHED: "ahead"}


def explain(planner: RequestPlanner) -> PlanExplanation:
    """Explain a planner's present choice; empty where no target has stated its costs."""
    target, draft, stats = planner.target, planner.draft, planner.stats.own
    if target is None:
        return PlanExplanation()
    cycles = Cycles(target, draft, stats, can_ahead=draft is not None)
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
        candidates=(*_model_candidates(planner, cycles.all()), _match_candidate(planner)),
        account_ms=planner.loss_budget.loss * target.step_ms(1),
        account_bound_ms=planner.loss_budget.bound * target.step_ms(1),
        group=group_report(target),
    )


def group_report(target: TargetTimes | None) -> GroupReport | None:
    """Report what the requests of a target do together; None: they never shared it.

    It reads a copy: metrics are collected on another thread, and to ask a group for an account may change it.
    """
    accounts = {} if target is None else {key: replace(one) for key, one in list(target.group.accounts.items())}
    if target is None or not accounts:
        return None
    group = replace(target.group, accounts=accounts)
    load, _ = max(accounts, key=lambda key: accounts[key].last_at)
    shared_by = target.sessions if target.sessions > 1 else 1 << load
    mode = group.mode(shared_by)
    other_at = max((one.last_at for (_, other), one in accounts.items() if other is not mode), default=0.0)
    modes = tuple(_mode_report(group, shared_by, each, mode) for each in Mode)
    mode_steps = group.steps - other_at
    return GroupReport(mode.name.lower(), mode_steps, target.sessions, group.promise, MARGIN, modes)


def _mode_report(group: Group, sessions: int, mode: Mode, present: Mode) -> ModeReport:
    account, name = group.account(sessions, mode), mode.name.lower()
    gain = None if mode is Mode.REST else account.last_gain
    if mode is present:
        return ModeReport(name, "runs", gain)
    if not group.is_open(sessions, mode):
        return ModeReport(name, "paused", gain, account.opens_at - group.steps)
    if mode is Mode.DRAFTS:
        steps = group.steps_to_drafts(sessions)
        return ModeReport(name, "unpromising" if steps is None else "waits", gain, steps or 0.0)
    rest_left = 0 if mode is Mode.REST else group.steps_to_see(sessions, Mode.REST)
    return ModeReport(name, "waits", gain, rest_left or account.last_at + FIRST_PAUSE - group.steps)


def _model_candidates(planner: RequestPlanner, cycles: dict[Strategy, Cycle]) -> list[CandidateExplanation]:
    """The candidates without matches. A cached proposal of any round counts as drafted ahead.

    Target-only is one token a round here, since matches are a candidate of their own.
    """
    return [
        CandidateExplanation(
            _NAMES[strategy.source],
            strategy.depth,
            cycle.tokens if strategy.depth else 1.0,
            cycle.ms,
            planner.round_counts[strategy],
        )
        for strategy, cycle in cycles.items()
    ]


def _match_candidate(planner: RequestPlanner) -> CandidateExplanation:
    """The candidate of matches. They differ in length and worth, so it has measured means of their rounds."""
    texts, counts = planner.stats.own.texts, planner.round_counts
    rounds = sum(count for strategy, count in counts.items() if strategy.source is Source.NGRAM)
    proposed, tokens, ms = round(texts.proposed.value), texts.tokens.value, texts.ms.value
    return CandidateExplanation(_NAMES[Source.NGRAM], proposed, tokens, ms, rounds)
