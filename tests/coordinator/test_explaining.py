"""What a request's explanation says that rounds were worth, against what they gave."""

from __future__ import annotations

import pytest

from coordinator.drafting.explaining import explain
from coordinator.policy.plan import Options, Source
from coordinator.policy.planner import Planner, RequestPlanner
from paceline.protocol.explanation import CandidateExplanation
from paceline.protocol.proposal import NGRAM, Proposal
from paceline.sampling.match import Match
from tests.coordinator.planned import ROW_MS, SENT_MS, STEP_MS, World, record

MATCH = Match(8, tuple(range(32)))
RIGHT = 7
"""Tokens of every second match that the target writes, too; of the others none."""
OTHER = 99


def followed(request: RequestPlanner, rounds: int, *, pause_at: int | None = None) -> tuple[float, float, float]:
    """Rounds behind a match each; returns tokens proposed, tokens committed and milliseconds of those that copy."""
    nodes, tokens, ms = list[int](), list[int](), list[float]()
    for number in range(rounds):
        right = RIGHT * (number % 2)
        plan = request.plan(Options(room=60, match=MATCH, lease=16))
        proposed = plan.nodes if plan.source is Source.NGRAM else 0
        accepted = min(right, proposed)
        took = record(1 + proposed, accepted, proposed, self_started=not proposed)
        if number == pause_at:
            took = record(1 + proposed, accepted, proposed, round_ms=1e6)
        proposal = Proposal(1, MATCH.following[:proposed], (1.0,) * proposed, drafter=NGRAM) if proposed else None
        request.learn(plan, took, proposal, tuple(range(accepted)))
        request.stats.take_match(MATCH, (*MATCH.following[:accepted], OTHER))
        if proposed:
            nodes.append(proposed)
            tokens.append(1 + accepted)
            ms.append(STEP_MS + ROW_MS * proposed + SENT_MS)
    assert len(nodes) > rounds // 2
    return sum(nodes) / len(nodes), sum(tokens) / len(tokens), sum(ms) / len(ms)


def ways(request: RequestPlanner) -> dict[str, CandidateExplanation]:
    """By name; of those of several lengths the longest."""
    return {each.name: each for each in explain(request).candidates}


def test_matches_are_shown_with_what_their_rounds_gave_and_target_only_with_its_one_token() -> None:
    request = World().request()
    nodes, tokens, ms = followed(request, 200)
    shown = ways(request)
    assert shown["none"].tokens == 1.0
    assert shown["none"].ms == pytest.approx(STEP_MS)
    assert shown["ngram"].tokens == pytest.approx(tokens, rel=0.1)
    assert shown["ngram"].ms == pytest.approx(ms, rel=0.1)
    assert shown["ngram"].draft_tokens == pytest.approx(nodes, abs=1)
    assert shown["ngram"].tokens_per_second > 2 * shown["none"].tokens_per_second


def test_what_others_copied_is_what_a_request_expects_of_matches() -> None:
    world = World()
    _, tokens, ms = followed(world.request(), 200)
    shown = ways(world.request())["ngram"]
    assert shown.tokens == pytest.approx(tokens, rel=0.1)
    assert shown.ms == pytest.approx(ms, rel=0.1)
    assert shown.rounds == 0


def test_where_nothing_was_copied_no_time_of_it_is_known() -> None:
    request = World(Planner()).request()
    request.plan(Options(room=60, lease=16))
    assert ways(request)["ngram"] == CandidateExplanation("ngram", 0, 1.0, 0.0, 0)


def test_a_pause_of_the_machine_is_no_match_s_time() -> None:
    request = World().request()
    _, _, ms = followed(request, 200, pause_at=150)
    assert ways(request)["ngram"].ms == pytest.approx(ms, rel=0.1)
