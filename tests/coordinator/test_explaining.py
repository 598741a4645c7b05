"""What a request's explanation says that rounds were worth, against what they gave."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from coordinator.drafting.explaining import explain
from coordinator.policy.plan import Options, Source
from coordinator.policy.planner import Planner, RequestPlanner
from paceline.protocol.explanation import CandidateExplanation
from paceline.protocol.proposal import NGRAM, Proposal
from paceline.protocol.records import RoundRecord
from paceline.sampling.match import Match
from tests.coordinator.planned import STEP_MS, World, record

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


def test_where_nothing_was_copied_no_time_of_it_is_known() -> None:
    request = World(Planner()).request()
    request.plan(Options(room=60, lease=16))
    assert ways(request, [])["ngram"] == CandidateExplanation("ngram", 0, 1.0, 0.0, 0)


@pytest.mark.parametrize(("hit", "name"), [(False, "wait"), (True, "ahead")])
def test_a_rounds_way_is_told_by_its_record(hit: bool, name: str) -> None:
    world = World()
    for seed in range(3):
        world.run(lambda _: 0.7, seed=seed)
    rounds = [record(4, 1, 3, drafter="model", cache_hit=hit), record(1)]
    explanation = explain(world.request(), rounds)
    assert explanation.acceptance[0] == pytest.approx(0.7, abs=0.15)
    counts = {(each.name, each.draft_tokens): each.rounds for each in explanation.candidates}
    assert {key for key, count in counts.items() if count} == {(name, 3), ("none", 0)}
