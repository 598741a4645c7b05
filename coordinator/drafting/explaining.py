"""The explanation of a request's plans, and what the requests of a target do together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from coordinator.policy.cycles import Cycles, Strategy
from coordinator.policy.group import Group
from coordinator.policy.plan import Source
from coordinator.policy.planner import RequestPlanner
from coordinator.policy.round_times import TargetTimes
from paceline.costs.acceptance import MAX_DEPTH
from paceline.costs.cycle import Cycle
from paceline.costs.goodput import FIRST_PAUSE, MARGIN, Mode, load_of
from paceline.costs.running_mean import OUTLIER
from paceline.protocol.explanation import (
    EXPLAINED_ROWS,
    CandidateExplanation,
    GroupReport,
    ModeReport,
    PlanExplanation,
)
from paceline.protocol.proposal import COPYING
from paceline.protocol.records import RoundRecord
from paceline.sampling.match import Match

EXPLAINED_MATCH = Match(2, (0,) * MAX_DEPTH)
"""The match whose acceptance an explanation gives: two tokens that occurred once."""
_NAMES = {Source.NONE: "none", Source.NGRAM: "ngram", Source.WAIT: "wait", Source.CACHED: "ahead"}


def explain(planner: RequestPlanner, records: Sequence[RoundRecord] = ()) -> PlanExplanation:
    """Explain a planner's present choice, with the rounds of its request; empty where no target stated its costs."""
    target, draft, stats = planner.target, planner.draft, planner.stats.own
    if target is None:
        return PlanExplanation()
    alone_ms, beside_ms = target.steps(), target.steps(beside=True)
    cycles = Cycles(target, draft, stats, can_ahead=draft is not None)
    return PlanExplanation(
        target_alone_ms=tuple(alone_ms(rows) for rows in EXPLAINED_ROWS),
        target_beside_ms=tuple(beside_ms(rows) for rows in EXPLAINED_ROWS),
        draft_ms=draft.step_ms(1) if draft is not None else 0.0,
        target_trip_ms=target.send_ms.value,
        draft_trip_ms=draft.wires[load_of(target.sessions)].value if draft is not None else 0.0,
        target_sessions=target.sessions,
        positions=stats.tokens.positions,
        acceptance=tuple(stats.tokens.reach(MAX_DEPTH)),
        ngram_acceptance=tuple(stats.texts.ngrams.prefix_chances(EXPLAINED_MATCH, MAX_DEPTH)),
        candidates=(*_model_candidates(cycles.all(), records), _match_candidate(records)),
        account_ms=planner.loss_budget.loss * alone_ms(1),
        account_bound_ms=planner.loss_budget.bound * alone_ms(1),
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


def _model_candidates(cycles: dict[Strategy, Cycle], records: Sequence[RoundRecord]) -> list[CandidateExplanation]:
    """The candidates without matches, each with the rounds that had as many tokens.

    Target-only is one token a round here, since matches are a candidate of their own.
    """
    counts = Counter((_source(record), record.proposed) for record in records)
    return [
        CandidateExplanation(
            _NAMES[strategy.source],
            strategy.depth,
            cycle.tokens if strategy.depth else 1.0,
            cycle.ms,
            counts[strategy.source, strategy.depth],
        )
        for strategy, cycle in cycles.items()
    ]


def _match_candidate(records: Sequence[RoundRecord]) -> CandidateExplanation:
    """The candidate of matches. They differ in length and worth, so it has means; a machine's pause is an outlier."""
    copies = [record for record in records if _source(record) is Source.NGRAM]
    if not copies:
        return CandidateExplanation(_NAMES[Source.NGRAM], tokens=1.0)
    proposed, tokens = fmean(record.proposed for record in copies), fmean(1 + record.accepted for record in copies)
    most_ms = OUTLIER * median(record.round_ms for record in copies)
    ms = fmean(min(record.round_ms, most_ms) for record in copies)
    return CandidateExplanation(_NAMES[Source.NGRAM], round(proposed), tokens, ms, len(copies))


def _source(record: RoundRecord) -> Source:
    """Where a round's proposal came from."""
    if not record.proposed:
        return Source.NONE
    if record.drafter in COPYING:
        return Source.NGRAM
    return Source.CACHED if record.cache_hit else Source.WAIT
