"""The overlap benchmark: what it replays, the laws that it runs on, and one small run of its services."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import frames, hit_rate
from benchmarks.laws import raced_ranks, table_of
from benchmarks.overlap import LAW_OF_ACCEPTANCE, replay, run_pair
from benchmarks.reporting import markdown_table, median_with_lower_bound
from benchmarks.timed import TimedPair, TimedServices
from paceline.client import Client
from paceline.engine.table_spec import TableSpec
from paceline.types import GenerationStats, RoundRecord, StepTimings

FAST = TimedPair("law=middling", 6.0, 0.5)


def record(hit: bool, forward_ms: float, accepted: int = 2, proposed: int = 4) -> RoundRecord:
    return RoundRecord(
        base_length=1,
        round_ms=99.0,
        draft_wait_ms=0.0,
        wire_ms=1.0,
        target=StepTimings(),
        accept_ms=0.0,
        proposed=proposed,
        accepted=accepted,
        cache_hit=hit,
        draft=StepTimings(forward_ms=forward_ms, queue_ms=50.0, service_ms=60.0),
    )


def test_a_replay_charges_verification_and_the_drafting_of_misses_alone() -> None:
    records = (record(False, 9.0), record(True, 8.0), record(False, 6.0), record(True, 8.0, 0, 0))
    stats = GenerationStats(rounds=4, committed=13, tokens_per_second=100.0, records=records)
    found = replay(stats, verify_ms=30.0)
    assert (found.rounds, found.hits) == (3, 1)
    assert found.seconds == pytest.approx((13 - 3) / 100)
    assert found.perfect_seconds == pytest.approx(0.09)
    assert found.ideal_seconds == pytest.approx(0.09 + 0.006 + 0.008)
    with_dear_waits = tuple(replace(each, draft_wait_ms=500.0) for each in records)
    assert replay(replace(stats, records=with_dear_waits), 30.0) == found


@pytest.mark.parametrize("acceptance", LAW_OF_ACCEPTANCE)
def test_laws_have_the_acceptance_that_they_are_listed_under(acceptance: float) -> None:
    target, draft = (table_of(TableSpec.parse(law)) for law in ("law=text", LAW_OF_ACCEPTANCE[acceptance]))
    assert float((raced_ranks(target, draft, draws=3) == 1).mean()) == pytest.approx(acceptance, abs=0.015)


def test_the_lower_bound_is_below_the_median_and_shrinks_to_it() -> None:
    median, lower = median_with_lower_bound([1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.0, 1.3, 0.7])
    assert median == 1.0
    assert 0.8 <= lower < median
    assert median_with_lower_bound([2.0] * 9) == (2.0, 2.0)


def test_tables_have_a_line_for_each_row() -> None:
    assert markdown_table([{"a": 1, "b": 0.25}]) == "| a | b |\n| --- | --- |\n| 1 | 0.250 |\n"
    assert markdown_table([]) == "not run\n"


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TimedServices]:
    with TimedServices(tmp_path_factory.mktemp("timed"), FAST) as running:
        yield running


def test_overlap_changes_no_text_and_its_replay_is_faster_than_the_run(services: TimedServices) -> None:
    with (
        services.coordinator("on", {"fan_out": 4}) as on_address,
        services.coordinator("off", {"fan_out": 0}) as off_address,
        Client(on_address) as on,
        Client(off_address) as off,
    ):
        fast, slow = run_pair(on, off, 3, 48)
        rate = hit_rate.measure(on, "middling", 1.0, 4, rounds=1, tokens=16)
    with_overlap, without = replay(fast.stats, FAST.verify_ms), replay(slow.stats, FAST.verify_ms)
    for found in (with_overlap, without):
        assert found.perfect_seconds <= found.ideal_seconds < found.seconds
    assert without.hits == 0
    assert rate.rounds >= 1
    assert 0 <= rate.hit_rate <= 1
    assert 0.8 < rate.predicted < 1


def test_frames_are_counted_with_clients_and_without(services: TimedServices, tmp_path: Path) -> None:
    cost = frames.measure(services, sessions=4, coordinators=2, tokens=8)
    assert cost.rounds >= 4
    assert cost.target_frames_per_step > 0
    headless = frames.measure_headless(services, sessions=4, tokens=8, folder=tmp_path)
    assert headless.rounds >= 4
    assert headless.frames_to_target > 0
    assert headless.coordinator_cpu_ms > 0
