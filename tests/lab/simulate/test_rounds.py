"""The simulator's rounds beside closed forms, and that a run depends on its seed alone."""

from __future__ import annotations

import itertools
import statistics

import pytest

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import InvalidInput
from paceline_lab.simulate.disturbances import Disturbance, ServiceChange
from paceline_lab.simulate.policies import TARGET_ONLY, Policy
from paceline_lab.simulate.run import SimulatedRun, concurrent, simulate
from paceline_lab.simulate.synthetic import PAIRS, SyntheticPair, synthetic_requests
from paceline_lab.simulate.trace import TracedRequest, TracedSetting

TARGET = CostLine(((1.0, 20.0), (257.0, 148.0)))
"""20 ms, and 0.5 for each row beyond the first."""
DRAFT = CostLine(((1.0, 2.0), (257.0, 27.6)))
"""2 ms, and 0.1 for each row beyond the first."""
SETTING = TracedSetting(alone=TARGET, draft=DRAFT)

CELLS = ((0.5, 2), (0.8, 8), (1.0, 4))
"""Acceptance and k: each of those of the whole table once, but for 0.0 and 1, which take the most rounds."""
OTHER_CELLS = sorted({*itertools.product((0.0, 0.5, 0.8, 1.0), (1, 2, 4, 8))} - {*CELLS})


def cycle_ms(run: SimulatedRun) -> float:
    """Mean time of the first request's rounds behind its first."""
    first = run.requests[0]
    return (first.end_ms - first.first_ms) / (first.rounds - 1)


def text(ranks: tuple[int, ...]) -> TracedRequest:
    """An answer with these ranks, all of the same chance, without matches."""
    return TracedRequest((0,), tuple(range(1, 1 + len(ranks))), ranks, (0.8,) * len(ranks))


@pytest.mark.parametrize(
    ("acceptance", "k"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.full) for cell in OTHER_CELLS)]
)
def test_a_waiting_session_alone_commits_and_takes_what_the_closed_form_says(acceptance: float, k: int) -> None:
    requests = synthetic_requests(SyntheticPair.even(acceptance), 1, 800, seed=3)
    run = simulate(SETTING, requests, Policy(k, 0))
    # 800 tokens in at least 88 rounds: the mean of a round's tokens is within 10 % of its expectation (3.5 sigma).
    expected = sum(acceptance**accepted for accepted in range(k + 1))  # Leviathan et al., arXiv 2211.17192
    assert run.tokens / run.rounds == pytest.approx(expected, rel=0.1)
    # A row for the committed token; after a whole proposal one more, for its last token.
    catching_up = DRAFT.per_row(1) * acceptance**k
    assert cycle_ms(run) == pytest.approx(TARGET.ms(1 + k) + k * DRAFT.ms(1) + catching_up, rel=0.01)


def test_ways_and_the_coordinator_add_to_a_round_that_is_sent() -> None:
    setting = SETTING.of_run(target_one_way_ms=3.0, draft_one_way_ms=5.0, coordinator_ms=1.0)
    run = simulate(setting, (text((0,) * 64),), Policy(2, 0))
    assert cycle_ms(run) == pytest.approx(TARGET.ms(3) + 2 * DRAFT.ms(1) + 2 * 3 + 2 * 5 + 1, rel=0.01)


def test_under_a_lease_no_way_costs_anything() -> None:
    setting = SETTING.of_run(target_one_way_ms=15.0, coordinator_ms=1.0)
    run = simulate(setting, (text((0,) * 256),), TARGET_ONLY)
    assert run.requests[0].self_started >= 254
    assert cycle_ms(run) == pytest.approx(TARGET.ms(1), rel=0.01)


def test_target_only_sessions_share_every_step() -> None:
    run = simulate(SETTING, concurrent([text((0,) * 64)], 16), TARGET_ONLY)
    assert cycle_ms(run) == pytest.approx(TARGET.ms(16), rel=0.02)
    assert run.target_steps <= 64 + 1


def test_sessions_that_wait_are_drafted_for_and_verified_in_step() -> None:
    run = simulate(SETTING, concurrent([text((0,) * 64)], 16), Policy(2, 0))
    # The first to arrive begins alone; the batching window brings it and the others together.
    assert cycle_ms(run) == pytest.approx(TARGET.ms(3 * 16) + 2 * DRAFT.ms(16), rel=0.06)


def test_hits_start_rounds_at_the_target_and_hide_the_draft() -> None:
    requests = synthetic_requests(SyntheticPair.even(0.8), 1, 300, seed=5)
    ahead = simulate(SETTING, requests, Policy(4, 4))
    first = ahead.requests[0]
    assert first.hits > 0.9 * first.rounds
    assert first.self_started > 0.75 * first.rounds
    hidden = TARGET.ms(5) / (TARGET.ms(5) + 4 * DRAFT.ms(1))
    assert cycle_ms(ahead) == pytest.approx(hidden * cycle_ms(simulate(SETTING, requests, Policy(4, 0))), rel=0.06)


def test_an_outcome_beyond_the_fan_out_is_a_miss() -> None:
    never = simulate(SETTING, (text((3, 1) * 64),), Policy(1, 1))
    always = simulate(SETTING, (text((3, 1) * 64),), Policy(1, 3))
    assert (never.requests[0].hits, always.requests[0].hits > 60) == (0, True)


def test_a_draft_on_the_targets_cores_slows_its_steps() -> None:
    setting = SETTING.of_run(beside=TARGET.scale(1.5))
    apart, beside = (simulate(each, (text((2,) * 64),), Policy(4, 4)) for each in (SETTING, setting))
    # The draft works for a part of each step.
    assert 1.1 * cycle_ms(apart) < cycle_ms(beside) < 1.5 * cycle_ms(apart)


def test_a_draft_on_the_targets_cores_is_slower_beside_its_steps_alone() -> None:
    requests, setting = (text((1,) * 64),), SETTING.of_run(draft_beside=DRAFT.scale(4.0))
    ahead, late = (simulate(each, requests, Policy(4, 4)) for each in (SETTING, setting))
    assert late.milliseconds > 1.5 * ahead.milliseconds, "two levels fit beside a step, where ten did"
    waited = [simulate(each, requests, Policy(4, 0)).milliseconds for each in (SETTING, setting)]
    assert waited[0] == waited[1], "nobody else is at work meanwhile"


def test_a_service_that_becomes_slower_is_slower_from_then_on() -> None:
    requests = (text((0,) * 100),)
    slow = Disturbance((ServiceChange(1000.0, "target", 2.0),))
    run, plain = simulate(SETTING, requests, TARGET_ONLY, slow), simulate(SETTING, requests, TARGET_ONLY)
    assert plain.milliseconds == pytest.approx(100 * 20, rel=0.01)
    assert run.milliseconds == pytest.approx(50 * 20 + 50 * 40, rel=0.02)


def test_the_next_request_begins_when_one_has_ended() -> None:
    requests = [text((0,) * 10)] * 6
    run = simulate(SETTING.of_run(concurrency=2), requests, TARGET_ONLY)
    arrivals = [request.arrival_ms for request in run.requests]
    ends = sorted(request.end_ms for request in run.requests)
    assert arrivals[:2] == [0.0, 0.0]
    assert sorted(arrivals[2:]) == ends[:4]


def test_a_run_depends_on_its_seed_alone() -> None:
    def run(seed: int) -> SimulatedRun:
        return simulate(SETTING, synthetic_requests(PAIRS["mixed"], 2, 24, seed=seed), Policy(4, 4))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_synthetic_pairs_have_the_acceptance_that_they_state() -> None:
    requests = synthetic_requests(PAIRS["good"], 64, 256, seed=2)
    ranks = [rank for request in requests for rank in request.ranks]
    chances = [chance for request in requests for chance in request.chances]
    assert statistics.mean(rank == 1 for rank in ranks) == pytest.approx(statistics.mean(chances), abs=0.01)
    assert statistics.mean(chances) == pytest.approx((0.92 + 0.7) / 2, abs=0.04)


@pytest.mark.parametrize("k", [-1, 17])
def test_a_constant_out_of_bounds_is_refused(k: int) -> None:
    with pytest.raises(InvalidInput, match=rf"k = {k}: must be in \[0, 16\]"):
        Policy(k, 0)
