"""Speeds, prices and verdicts against hand-computed ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.drafting.settings import fixed_plan
from coordinator.policy.plan import Source
from paceline.costs.cost_line import LEAST_STEP_MS, CostLine
from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import NGRAM
from paceline_lab.plan.traces import traced_draft, traced_times
from paceline_lab.predict.cycle import DraftingMode, StepTimes, ahead, just_in_time, target_only
from paceline_lab.predict.prices import Prices, fleet_of
from paceline_lab.predict.rounds import ProposalShape, expected_rounds
from paceline_lab.predict.verdict import LEAST_GAIN, Candidates, profit_inequality, turning_points, verdict_of
from paceline_lab.simulate.policies import TARGET_ONLY, Policy
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.synthetic import PAIRS, synthetic_requests
from paceline_lab.simulate.trace import TracedSetting
from tests.lab.predict.made_positions import made_positions

POSITIONS = made_positions([0.8] * 800, 0.9, 0.95)
TARGET = CostLine(((1, 20.0), (11, 30.0)))  # 1 ms for each row more
DRAFT = CostLine(((1, 2.0), (101, 2.0)))
TIMES = StepTimes(TARGET, {"d": DRAFT}, target_trip_ms=1.0, draft_trip_ms=1.0)
DEPTHS = tuple(ProposalShape(k) for k in (0, 1, 2, 4, 8))


def tokens(k: int) -> float:
    """A round's (tests/lab/predict/test_rounds.py)."""
    return expected_rounds([POSITIONS], ProposalShape(k)).tokens


def test_a_round_drafted_just_in_time_by_hand() -> None:
    expected = expected_rounds([POSITIONS], ProposalShape(4))
    speed = just_in_time(TIMES, "d", expected, 1)
    assert speed.round_ms == pytest.approx(24 + 4 * 2 + 2)
    assert speed.tokens_per_second == pytest.approx(1e3 * tokens(4) / 34)
    assert speed.draft_busy == pytest.approx(8 / 34)
    assert target_only(TIMES, 1).ms_per_token == pytest.approx(20)
    shared = just_in_time(TIMES, "d", expected, 3)  # all wait for the same hardware, and step together
    assert shared.round_ms == pytest.approx(TARGET.ms(15) + 8 + 2)


def test_matches_wait_for_no_draft_and_pay_the_way_in_every_round_that_has_no_lease() -> None:
    expected = replace(expected_rounds([POSITIONS], ProposalShape(2)), proposed=((0, 0.75), (2, 0.25)))
    speed = just_in_time(TIMES, NGRAM, expected, 1)
    without = fixed_plan(2, None, None, (), fan_out=0, model=False)
    assert without.source is Source.NONE
    ways_ms = TIMES.target_trip_ms * (0.25 + 0.75 / (1 + without.lease))  # a lease has more rounds than the one sent
    assert speed.round_ms == pytest.approx(0.75 * 20 + 0.25 * 22 + ways_ms)
    assert speed.draft_ms == speed.draft_busy == 0


def test_apart_sessions_that_wait_are_not_in_the_step() -> None:
    apart = replace(TIMES, apart=True, draft_trip_ms=100.0)
    expected = expected_rounds([POSITIONS], ProposalShape(1))
    speed = just_in_time(apart, "d", expected, 8)
    step_ms = speed.round_ms - 2.0 - 1 - 100
    inside = 8 * step_ms / speed.round_ms
    assert step_ms == pytest.approx(TARGET.ms(2 * inside), rel=1e-6)
    assert inside < 4


def test_ahead_hits_wait_for_nothing_and_misses_for_everything() -> None:
    apart = replace(TIMES, apart=True)
    whole = expected_rounds([POSITIONS], ProposalShape(4))
    speed = ahead(apart, "d", lambda depth: expected_rounds([POSITIONS], ProposalShape(depth)), 4, 1)
    assert speed.round_ms == pytest.approx(24 + (1 - whole.hits) * (8 + 2))
    assert speed.tokens == pytest.approx(tokens(4))
    slow = replace(apart, drafts={"d": CostLine(((1, 4.9),))})  # 4 levels before ways and prefetch: 3 tokens ahead
    fewer = ahead(slow, "d", lambda depth: expected_rounds([POSITIONS], ProposalShape(depth)), 4, 1)
    assert fewer.tokens == pytest.approx(whole.hits * tokens(3) + (1 - whole.hits) * tokens(4))


def test_the_verdict_takes_the_fastest_and_says_dont_where_nothing_pays() -> None:
    candidates = Candidates({"d": [POSITIONS]}, DEPTHS)
    found = verdict_of(candidates, TIMES, 1)
    by_hand = {k: 20 * tokens(k) / (20 + k + 2 * k + 2) for k in (1, 2, 4, 8)}
    assert found.gain == pytest.approx(max(by_hand.values()))
    assert found.best.setting == f"k={max(by_hand, key=lambda k: by_hand[k])}"
    assert found.pays and "with d" in found.words
    dear = replace(TIMES, drafts={"d": CostLine(((1, 20.0),))})
    never = verdict_of(candidates, dear, 1)
    assert not never.pays and never.words.startswith("don't draft")


def test_a_gain_within_two_errors_of_none_is_in_doubt() -> None:
    texts = [made_positions([chance] * 60) for chance in (0.1, 0.3, 0.9)]
    found = verdict_of(Candidates({"d": texts}, DEPTHS), TIMES, 1)
    expected = expected_rounds(texts, ProposalShape.parse(found.best.setting.removeprefix("k=")))
    assert found.error == pytest.approx(found.gain * expected.error / expected.tokens)
    assert not found.is_sure and "too near to call" in found.words
    alone = verdict_of(Candidates({"d": [POSITIONS]}, DEPTHS), TIMES, 1).words
    assert "too near" not in alone and "not known of so few" in alone and "±" not in alone
    agreed = verdict_of(Candidates({"d": [made_positions([1.0] * 40)] * 16}, DEPTHS), TIMES, 1)
    assert agreed.error == 0 and agreed.is_sure
    assert "not known" not in agreed.words and "± 0.00" in agreed.words


def test_the_inequality_holds_where_the_verdict_pays() -> None:
    """A round of k = 1 takes 21 + 2 ms and the ways: its gain is 1.02 and 1.04."""
    candidates = Candidates({"d": [POSITIONS]}, (ProposalShape(1),))
    for gain, pays in ((1.02, False), (1.04, True)):
        trips_ms = (20 * tokens(1) / gain - 23) / 2 - 1
        times = TIMES.slower(trips_ms=trips_ms)
        found = profit_inequality(times, "d", candidates.rounds_of("d", ProposalShape(1)))
        assert found.gain == pytest.approx(gain)
        assert found.holds == verdict_of(candidates, times, 1).pays == pays
        assert (found.trip_ms, found.draft_ms, found.verify_ms) == pytest.approx((2 + 2 * trips_ms, 2, 21))


def test_turning_points_by_hand() -> None:
    candidates = Candidates({"d": [POSITIONS]}, (ProposalShape(1),))
    turns = turning_points(candidates, TIMES, 1)
    # gain = 20 (1 + a) / (23 + 2 trip): 1.03 at these
    assert turns.trips_ms == pytest.approx((20 * tokens(1) / LEAST_GAIN - 23) / 2 - 1, rel=1e-2)
    assert turns.acceptance == pytest.approx((LEAST_GAIN * 25 / 20 - 1) / 0.8, rel=1e-2)
    assert turns.draft == pytest.approx((20 * tokens(1) / LEAST_GAIN - 23) / 2, rel=1e-2)
    # gain(S) = 1.8 T(S) / (T(2S) + 4): the first power of two at which it is below
    loads = [1 << power for power in range(11)]
    gains = [tokens(1) * TARGET.ms(load) / (TARGET.ms(2 * load) + 4) for load in loads]
    assert turns.sessions == next(load for load, gain in zip(loads, gains, strict=True) if gain < LEAST_GAIN)


@pytest.mark.parametrize(("target_ms", "draft_ms"), [(1.0, 60.0), (10.0, 0.0), (0.0, 10.0), (60.0, 1.0)])
def test_ways_that_differ_turn_the_verdict_from_where_they_are(target_ms: float, draft_ms: float) -> None:
    """Drafting pays where both ways together take so long or less: 20 E / 1.03 - 23 ms."""
    bound_ms = 20 * tokens(1) / LEAST_GAIN - 23
    apart = replace(TIMES, target_trip_ms=target_ms, draft_trip_ms=draft_ms)
    candidates = Candidates({"d": [POSITIONS]}, (ProposalShape(1),))
    more_ms = turning_points(candidates, apart, 1).trips_ms
    assert more_ms is not None and (more_ms > 0) == (target_ms + draft_ms < bound_ms)
    assert max(0, target_ms + more_ms) + max(0, draft_ms + more_ms) == pytest.approx(bound_ms, abs=0.05)


def test_what_never_turns_is_said_so() -> None:
    free = StepTimes(CostLine(((1, 20.0),)), {"d": CostLine(((1, LEAST_STEP_MS),))}, target_trip_ms=0.0)
    turns = turning_points(Candidates({"d": [POSITIONS]}, (ProposalShape(2),)), free, 1)
    assert turns.sessions is None and turns.draft is None
    useless = Candidates({"d": [made_positions([0.0] * 40)]}, (ProposalShape(2),))
    turns = turning_points(useless, TIMES, 1)
    assert turns.acceptance is None and turns.trips_ms is None and turns.draft is None


def test_prices_count_whole_services_and_busy_shares() -> None:
    speed = just_in_time(TIMES, "d", expected_rounds([POSITIONS], ProposalShape(4)), 1)
    per_second = 1e3 * tokens(4) / 34
    alone = fleet_of(speed, Prices(target_hour=10.0, draft_hour=1.0), apart=True)
    assert alone.cost_per_million == pytest.approx((10 + 8 / 34) / (3600 * per_second) * 1e6)
    assert fleet_of(speed, Prices(target_hour=10.0, draft_hour=1.0), apart=False).drafts == 0
    many = fleet_of(speed, Prices(10.0, 1.0, traffic=1000.0, target_gpus=4), apart=True)
    targets = -(-1000 // per_second)
    drafts = -(-targets * (8 / 34) // 1)
    assert (many.targets, many.drafts, many.gpus) == (targets, drafts, 4 * targets + drafts)
    with pytest.raises(InvalidInput, match="traffic"):
        Prices(traffic=-1)


def test_ahead_is_offered_only_where_drafts_are_apart() -> None:
    candidates = Candidates({"d": [POSITIONS], "ngram": [POSITIONS]}, (*DEPTHS, ProposalShape(2, (2,))))
    modes = {speed.mode for speed in candidates.speeds(TIMES, 1)}
    assert modes == {DraftingMode.NONE, DraftingMode.WAIT}
    apart = [each for each in candidates.speeds(replace(TIMES, apart=True), 1) if each.mode is DraftingMode.AHEAD]
    assert {each.drafter for each in apart} == {"d"} and all("tree" not in each.setting for each in apart)


@pytest.mark.parametrize(
    ("one_way_ms", "draft_ms", "least"),
    [
        *(pytest.param(one_way_ms, 2.0, 0.75, marks=pytest.mark.full) for one_way_ms in (0.0, 5.0, 20.0)),
        (0.5, 12.0, 0.9),  # a level fits into a step, and no proposal: a hit waits for what is being drafted
    ],
)
def test_ahead_is_as_fast_as_simulated_rounds_however_far_or_slow_the_drafts_are(
    one_way_ms: float, draft_ms: float, least: float
) -> None:
    """By the same ranks: what differs is what the closed form leaves out."""
    setting = TracedSetting(
        alone=CostLine(((1.0, 20.0), (257.0, 32.8))),
        draft=CostLine(((1.0, draft_ms), (257.0, draft_ms + 5.12))),
        draft_one_way_ms=one_way_ms,
        concurrency=1,
    )
    requests = synthetic_requests(PAIRS["good"], 2, 200, seed=3)
    drafts = [traced_draft(request) for request in requests]
    times = traced_times(setting, "d", apart=True)
    k = 4 if draft_ms < 4 else 1
    speed = ahead(times, "d", lambda depth: expected_rounds(drafts, ProposalShape(depth)), k, 1)
    served, plain = (simulate(setting, requests, policy) for policy in (Policy(k), TARGET_ONLY))
    gain = served.tokens_per_second / plain.tokens_per_second
    # Too careful in between: what was drafted beyond a proposal is there when the next round needs it.
    assert least * gain < speed.gain(target_only(times, 1)) < 1.1 * gain


def test_what_comes_too_late_to_be_prefetched_pays_the_targets_way() -> None:
    """24 ms, of which 21 are ways and 2 the prefetch's: no level of 2 fits. At the coordinator 24 + 20 - 1 do."""
    away = replace(TIMES, apart=True, target_trip_ms=20.0)
    whole = expected_rounds([POSITIONS], ProposalShape(4))
    speed = ahead(away, "d", lambda depth: expected_rounds([POSITIONS], ProposalShape(depth)), 4, 1)
    assert speed.round_ms == pytest.approx(24 + whole.hits * 20 + (1 - whole.hits) * (8 + 21))
    assert speed.tokens == pytest.approx(tokens(4))
