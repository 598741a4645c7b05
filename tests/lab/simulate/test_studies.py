"""Studies beside arithmetic, published speeds beside the simulator, and what a validation says of itself."""

from __future__ import annotations

from typing import Any

import pytest
from scipy.optimize import brentq

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import InvalidInput
from paceline_lab.bench.validation import PAIR, Deviation, ValidationCell, predicted_setting, validation_text
from paceline_lab.simulate.policies import ConstantPolicy
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.studies import STUDIES, capacity, run_studies
from paceline_lab.simulate.studies.capacity import GAMMA, CapacityGain, TimedPair
from paceline_lab.simulate.studies.parts import MIDDLE, run
from paceline_lab.simulate.synthetic import SyntheticPair, synthetic_requests
from paceline_lab.simulate.trace import TracedSetting


def decode_speed(policy: ConstantPolicy, acceptance: float, target_ms: float, draft_ms: float) -> float:
    """Tokens per second of 16 requests, one by one, of a text that is as easy everywhere."""
    setting = TracedSetting(
        alone=CostLine(((1.0, target_ms),)),
        draft=CostLine(((1.0, draft_ms),)),
        fan_out=policy.fan_out,
        max_prefetched=0,
        concurrency=1,
    )
    return simulate(
        setting, synthetic_requests(SyntheticPair.even(acceptance), 16, 512), policy
    ).decode_tokens_per_second


def test_overlap_waits_for_whole_proposals_in_k_and_one_steps() -> None:
    """Perfect drafts, 3 ms a step, a target's of 10 ms: k + 1 tokens in (k + 1) · 3 ms, or in 10 if that is more."""
    for k, round_ms in ((2, 10.0), (4, 15.0), (7, 24.0)):
        speed = decode_speed(ConstantPolicy(k, 3, whole=True), 1.0, 10.0, 3.0)
        assert speed == pytest.approx(1e3 * (k + 1) / round_ms, rel=0.03), k


@pytest.mark.full
def test_published_speeds_that_were_not_fitted_are_met_within_five_percent() -> None:
    """SSD (arXiv 2603.03251), Qwen3-32B and 0.6B, tokens per second: 97.4 without drafts, 141.4 with k = 4 drafted
    one after the other, 210.9, 193.6, 175.3 and 158.6 with k = 4 to 7 overlapped, each of which waits for all k.

    The target's step is of the first, the draft's and the acceptance of the next two; the others are predicted.
    """

    def overlapped(k: int, acceptance: float) -> float:
        sequential_ms = 1e3 * sum(acceptance**n for n in range(5)) / 141.4
        draft_ms = (sequential_ms - 1e3 / 97.4) / 4
        return decode_speed(ConstantPolicy(k, 3, whole=True), acceptance, 1e3 / 97.4, draft_ms)

    fitted = float(brentq(lambda acceptance: overlapped(4, acceptance) - 210.9, 0.6, 0.95, xtol=1e-3))
    for k, published in ((5, 193.6), (6, 175.3), (7, 158.6)):
        assert overlapped(k, fitted) == pytest.approx(published, rel=0.05), k


def test_the_claimed_gain_is_of_the_steps_own_times() -> None:
    assert TimedPair("x", batches=False).claimed(64) == pytest.approx(1 + 4 * 2.02 / 20.25)
    assert TimedPair("x", row_ms=0.5).claimed(8) == pytest.approx(1 + 4 * 2.16 / 40.0)


def test_without_batching_as_many_more_clients_are_served_as_the_formula_says() -> None:
    """Saturated, one proposal a step: E ÷ (t_v + γ·t_d) against E ÷ t_v for all clients together."""
    pair = TimedPair("x", batches=False)
    speeds = {each: _speed(pair, 24, elsewhere=each) for each in (False, True)}
    assert speeds[True] / speeds[False] == pytest.approx(pair.claimed(24), rel=0.04)


def _speed(pair: TimedPair, clients: int, *, elsewhere: bool) -> float:
    traffic: dict[str, Any] = {
        "sessions": clients,
        "prompt_tokens": {"median": 8},
        "answer_tokens": {"median": 128},
        "acceptance": 0.8,
    }
    target = {**pair.target(drafts_itself=not elsewhere), "link": {"ms": 0}}
    draft = {**pair.draft(elsewhere=elsewhere), "link": {"ms": 0}}
    found = run(target, traffic, drafts=draft, k=str(GAMMA), seconds=8.0, coordinators={"round_ms": 0})
    return found.tokens_per_second


def test_a_gain_is_of_the_same_number_of_clients() -> None:
    itself = [100.0 / each for each in capacity.CLIENTS]
    found = CapacityGain(TimedPair("x"), itself, [150.0 / each for each in capacity.CLIENTS], itself)
    assert found.gain(8, found.elsewhere) == pytest.approx(1.5)
    assert [row["gain ahead"] for row in found.rows()] == [1.0] * len(capacity.CLIENTS)


def test_a_named_model_drafts_faster_than_it_decodes_alone() -> None:
    one = {"sessions": 2, "answer_tokens": {"median": 60}, "prompt_tokens": {"median": 8}}
    plain = run(MIDDLE.targets(1), one, k="0", seconds=3.0, warmup_seconds=1.0)
    drafted = run(MIDDLE.targets(1), one, drafts=MIDDLE.drafts(1), k="4+ahead", seconds=3.0, warmup_seconds=1.0)
    assert drafted.tokens_per_second > 1.3 * plain.tokens_per_second


def test_an_unknown_study_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="study = 'speed': must be all or one of drafts, zones"):
        run_studies("speed", None, 0)
    assert set(STUDIES) == {"drafts", "zones", "capacity", "breaking", "cost"}


def test_a_prediction_takes_the_stated_times_and_what_the_cell_alone_took_beyond_them() -> None:
    alone = TracedSetting(
        alone=CostLine(((1.0, 21.05),)), draft=CostLine(((1.0, 2.52),)), target_one_way_ms=0.4, coordinator_ms=0.2
    )
    own = TracedSetting(alone=CostLine(((1.0, 99.0),)), draft=CostLine(((1.0, 9.0),)), concurrency=8, fan_out=4)
    found = predicted_setting(ValidationCell(2, 8, 5.0, "4+ahead"), own, alone)
    assert found.alone.ms(101) == pytest.approx(PAIR.verify_ms + 0.05 * 101 + 1.0)
    assert found.draft.ms(1) == pytest.approx(2.52)
    assert (found.target_one_way_ms, found.coordinator_ms, found.concurrency) == (5.4, 0.2, 8)


def test_a_validation_counts_what_is_near() -> None:
    cell = ValidationCell(1, 4, 0.0, "4")
    text = validation_text([Deviation(cell, 100.0, 104.0, 120.0, "1.0"), Deviation(cell, 100.0, 94.0, 99.0, "1.0")])
    assert "Within 5%: 1 of 2 replayed, 1 predicted." in text
    assert "+4.0%" in text
    assert "-6.0%" in text
