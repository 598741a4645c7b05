"""What is shown of plans: what rounds were worth, the mode of a group, what modes gained, why others do not run."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from statistics import fmean

import pytest

from coordinator.drafting.explaining import explain, group_report
from coordinator.policy.plan import Options, Source
from coordinator.policy.planner import RequestPlanner
from coordinator.policy.round_times import TargetTimes
from paceline.costs.goodput import FIRST_PAUSE, LOOK_STEPS, MARGIN
from paceline.protocol.explanation import CandidateExplanation, GroupReport, ModeReport
from paceline.protocol.proposal import NGRAM, Proposal
from paceline.protocol.records import RoundRecord
from paceline.sampling.match import Match
from tests.coordinator.planned import STEP_MS, SaidByTarget, World, record
from tests.coordinator.test_group import WAVE, gains, run

MATCH = Match(8, tuple(range(32)))
RIGHT = 7
"""Tokens of every second match that the target writes, too; of the others none."""
OTHER = 99


def followed(request: RequestPlanner, rounds: int) -> list[RoundRecord]:
    """The records of rounds behind a match each."""
    records = []
    for number in range(rounds):
        plan = request.plan(Options(room=60, match=MATCH, lease=16))
        proposed = plan.nodes if plan.source is Source.NGRAM else 0
        accepted = min(RIGHT * (number % 2), proposed)
        drafter = NGRAM if proposed else ""
        records.append(record(1 + proposed, accepted, proposed, self_started=not proposed, drafter=drafter))
        proposal = Proposal(1, MATCH.following[:proposed], (1.0,) * proposed, drafter=NGRAM) if proposed else None
        request.learn(plan, records[-1], proposal, tuple(range(accepted)))
        request.stats.take_match(MATCH, (*MATCH.following[:accepted], OTHER))
    return records


def ways(request: RequestPlanner, records: list[RoundRecord]) -> dict[str, CandidateExplanation]:
    """By name; of those of several lengths the longest."""
    return {each.name: each for each in explain(request, records).candidates}


def test_matches_are_shown_with_what_their_rounds_gave_and_target_only_with_its_one_token() -> None:
    request = World().request()
    records = followed(request, 200)
    copies = [each for each in records if each.proposed]
    assert len(copies) > 100
    shown = ways(request, records)
    assert shown["none"].tokens == 1.0
    assert shown["none"].ms == pytest.approx(STEP_MS)
    assert shown["none"].rounds == 200 - len(copies)
    assert shown["ngram"].rounds == len(copies)
    assert shown["ngram"].tokens == pytest.approx(fmean(1 + each.accepted for each in copies))
    assert shown["ngram"].draft_tokens == pytest.approx(fmean(each.proposed for each in copies), abs=1)
    assert shown["ngram"].tokens_per_second > 2 * shown["none"].tokens_per_second
    pause = replace(copies[0], round_ms=1e6)
    assert ways(request, [pause, *copies])["ngram"].ms == pytest.approx(shown["ngram"].ms, rel=0.1)


@pytest.mark.parametrize(("hit", "name"), [(False, "wait"), (True, "ahead")])
def test_a_rounds_way_is_told_by_its_record(hit: bool, name: str) -> None:
    world = World()
    for seed in range(3):
        world.run(lambda _: 0.7, seed=seed)
    rounds = [record(4, 1, 3, drafter="model", cache_hit=hit), record(1)]
    request = world.request()
    explanation = explain(request, rounds)
    assert explanation.acceptance[0] == pytest.approx(0.7, abs=0.15)
    counts = {(each.name, each.draft_tokens): each.rounds for each in explanation.candidates}
    assert {key for key, count in counts.items() if count} == {(name, 3), ("none", 0)}
    assert ways(request, [])["ngram"] == CandidateExplanation("ngram", 0, 1.0, 0.0, 0), "nothing was copied"


SESSIONS = 4
LOSING, GAINING = gains(0.5, 0.5), gains(1.1, 1.5)


def shared_target(promise: float = 0.0) -> TargetTimes:
    times = TargetTimes(SaidByTarget(sessions=SESSIONS))
    times.group.promise = promise
    return times


def report_of(times: TargetTimes) -> tuple[GroupReport, dict[str, ModeReport]]:
    report = group_report(times)
    assert report is not None
    return report, {each.name: each for each in report.modes}


def test_modes_that_lost_are_paused_for_as_long_as_is_said() -> None:
    assert group_report(None) is group_report(shared_target()) is explain(World().request()).group is None
    times = shared_target(promise=2.0)
    run(times.group, SESSIONS, LOSING, WAVE)
    report, modes = report_of(times)
    assert (report.mode, report.sessions, report.promise, report.promise_bound) == ("rest", SESSIONS, 2.0, MARGIN)
    assert [modes[name].state for name in ("rest", "matches", "drafts")] == ["runs", "paused", "paused"]
    assert modes["rest"].gain is None
    assert modes["matches"].gain == modes["drafts"].gain == pytest.approx(0.5), "as they were left"
    assert 0 < report.mode_steps < WAVE
    first = min(modes["matches"].wait_steps, modes["drafts"].wait_steps)
    assert 0 < first < FIRST_PAUSE
    run(times.group, SESSIONS, LOSING, int(first) - 1)
    times.peer = SaidByTarget(sessions=1)
    alone, modes = report_of(times)
    assert (alone.sessions, alone.mode, modes["matches"].state) == (1, "rest", "paused"), "as many as last"
    times.peer = SaidByTarget(sessions=SESSIONS)
    later, _ = report_of(times)
    assert later.mode == "rest"
    assert later.mode_steps == pytest.approx(report.mode_steps + int(first) - 1)
    run(times.group, SESSIONS, LOSING, 2)
    assert report_of(times)[0].mode != "rest"


def test_what_gains_runs_and_the_others_have_their_turn() -> None:
    times = shared_target(promise=1.5)
    run(times.group, SESSIONS, GAINING, WAVE)
    report, modes = report_of(times)
    assert report.mode == "drafts"
    assert report.mode_steps == pytest.approx((WAVE - LOOK_STEPS) / 1.5, abs=2), "a round of it takes less"
    assert [modes[name].state for name in ("rest", "matches", "drafts")] == ["waits", "waits", "runs"]
    assert modes["drafts"].gain == pytest.approx(1.5, rel=1e-2)
    assert modes["matches"].gain == pytest.approx(1.1, rel=1e-2)
    began_at, wait_steps = times.group.steps, modes["rest"].wait_steps
    while report.mode != "rest":
        run(times.group, SESSIONS, GAINING, 1)
        report, modes = report_of(times)
    assert times.group.steps - began_at == pytest.approx(wait_steps, abs=1)
    assert 0 < modes["matches"].wait_steps <= LOOK_STEPS, "behind the look at rest"
    times = shared_target(promise=1.5)
    run(times.group, SESSIONS, GAINING, 3)
    report, modes = report_of(times)
    assert (report.mode, modes["drafts"].state) == ("matches", "waits")
    assert modes["drafts"].wait_steps == math.ceil(LOOK_STEPS - 3 / 1.1)


def test_drafts_that_promise_too_little_and_drafts_that_brought_less_are_told_apart() -> None:
    times = shared_target(promise=MARGIN)
    run(times.group, SESSIONS, GAINING, WAVE)
    report, modes = report_of(times)
    assert (report.mode, modes["drafts"]) == ("matches", ModeReport("drafts", "unpromising"))
    tried = shared_target(promise=1.5)
    run(tried.group, SESSIONS, gains(1.1, 1.08), 2 * WAVE)
    report, modes = report_of(tried)
    assert (report.mode, modes["drafts"].state) == ("matches", "paused")
    assert modes["drafts"].gain == pytest.approx(1.08, rel=1e-2)


@pytest.mark.parametrize("sessions", [1, SESSIONS, 16])
def test_a_report_changes_nothing(sessions: int) -> None:
    """Also where an account is too old, or the load is new: to ask the group itself would forget, or make one."""
    times = shared_target(promise=1.5)
    run(times.group, SESSIONS, GAINING, WAVE)
    times.group.steps += 2 * FIRST_PAUSE
    times.peer = SaidByTarget(sessions=sessions)
    before = copy.deepcopy(times.group)
    group_report(times)
    assert times.group == before
