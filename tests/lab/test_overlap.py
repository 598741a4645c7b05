"""The overlap benchmark: what it replays, the distributions that it runs on, and one small run of its services."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paceline.client import Client
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.records import GenerationStats, RoundRecord, StepTimings
from paceline_lab.bench.simulated.delay import DelayProxy
from paceline_lab.bench.simulated.distributions import DRAFT_OF_ACCEPTANCE, coupled_match
from paceline_lab.bench.simulated.overlap import Results
from paceline_lab.bench.simulated.remote import DelayedServices, Remote
from paceline_lab.bench.simulated.replay import SPECULATION, losses, pool, replay, run_pair
from paceline_lab.bench.simulated.services import SimulatedPair, request
from paceline_lab.reporting.figures import median_with_lower_bound
from paceline_lab.reporting.presentation import markdown_table

FAST = SimulatedPair("distribution=middling", 6.0, 0.5)


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


def test_a_replay_at_a_distance_pays_a_trip_a_round_and_another_for_a_draft_made_just_in_time() -> None:
    records = (record(False, 9.0), record(True, 8.0), record(False, 6.0), record(False, 0.0, 0, 0))
    stats = GenerationStats(rounds=4, committed=12, tokens_per_second=100.0, records=records)
    near, far = replay(stats, 30.0), replay(stats, 30.0, one_way_ms=5.0)
    assert far.perfect_seconds == pytest.approx(3 * 0.040)
    assert far.ideal_seconds == pytest.approx(3 * 0.040 + 0.006 + 0.010)
    assert (far.rounds, far.hits, far.tokens, far.seconds) == (near.rounds, near.hits, near.tokens, near.seconds)
    both = pool([near, far])
    assert both.rounds == 6
    assert both.hit_rate == pytest.approx(1 / 3)
    assert both.tokens_per_second == pytest.approx(near.tokens_per_second)
    assert both.of_ideal == pytest.approx((near.ideal_seconds + far.ideal_seconds) / (2 * near.seconds))


def test_losses_are_what_rounds_take_beyond_their_replay() -> None:
    service = StepTimings(service_ms=31.5)
    hits = [replace(record(True, 8.0), target=service, wire_ms=wire, accept_ms=0.2) for wire in (0.5, 0.7, 9.0)]
    misses = [replace(record(False, 6.0), draft_wait_ms=wait) for wait in (7.0, 8.0, 9.0)]
    found = losses([*hits, *misses, record(False, 0.0, 0, 0)], verify_ms=30.0)
    assert found.wire == 0.7
    assert found.target == pytest.approx(1.5)
    assert (found.deciding, found.drafting) == (0.2, 2.0)
    assert losses(hits, 30.0).drafting == 0.0
    self_started = [
        replace(hit, self_started=True, round_ms=ms) for hit, ms in zip(hits, (31.0, 30.75, 34.0), strict=True)
    ]
    assert (losses(hits, 30.0).self_started, losses(self_started, 30.0).self_started) == (0.0, 1.0)
    assert (losses(self_started, 30.0).wire, losses([*hits, *self_started], 30.0).wire) == (0.0, 0.7)


def test_a_round_that_the_target_began_pays_no_way_to_it() -> None:
    sent = [record(True, 8.0) for _ in range(4)]
    self_started = [sent[0], *(replace(each, self_started=True) for each in sent[1:])]
    stats = GenerationStats(rounds=4, committed=12, tokens_per_second=100.0)
    paid, saved = (replay(replace(stats, records=tuple(each)), 30.0, one_way_ms=5.0) for each in (sent, self_started))
    assert (paid.self_started_rate, saved.self_started_rate) == (0.0, 1.0)
    assert paid.ideal_seconds == pytest.approx(3 * 0.040)
    assert saved.ideal_seconds == pytest.approx(3 * 0.030)


@pytest.mark.parametrize("acceptance", DRAFT_OF_ACCEPTANCE)
def test_drafts_have_the_acceptance_that_they_are_listed_under(acceptance: float) -> None:
    assert coupled_match(DRAFT_OF_ACCEPTANCE[acceptance], 1.0) == pytest.approx(acceptance, abs=0.005)


def test_the_lower_bound_is_below_the_median_and_shrinks_to_it() -> None:
    median, lower = median_with_lower_bound([1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.0, 1.3, 0.7])
    assert median == 1.0
    assert 0.8 <= lower < median
    assert median_with_lower_bound([2.0] * 9) == (2.0, 2.0)


def test_tables_have_a_line_for_each_row() -> None:
    assert markdown_table([{"a": 1, "b": 0.25}]) == "| a | b |\n| --- | --- |\n| 1 | 0.250 |\n"
    assert markdown_table([]) == "not run\n"


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedServices]:
    with FAST.services(tmp_path_factory.mktemp("timed")) as running:
        yield running


def test_overlap_changes_no_text_and_its_replay_is_faster_than_the_run(services: SupervisedServices) -> None:
    with (
        services.coordinator("on", {"fan_out": 4}) as on_address,
        services.coordinator("off", {"fan_out": 0}) as off_address,
        Client(on_address) as on,
        Client(off_address) as off,
    ):
        fast, slow = run_pair(on, off, request(3, 48, SPECULATION))
    with_overlap, without = replay(fast.stats, FAST.verify_ms), replay(slow.stats, FAST.verify_ms)
    for found in (with_overlap, without):
        assert found.perfect_seconds <= found.ideal_seconds < found.seconds
    assert with_overlap.hits > without.hits == 0


def test_a_cell_at_a_distance_has_the_same_text_and_slower_rounds(services: SupervisedServices) -> None:
    with (
        DelayProxy.to(services.address_of("target")) as to_target,
        DelayProxy.to(services.address_of("draft")) as to_draft,
        services.coordinator(
            "on", {"fan_out": 4, "target.address": to_target.address, "draft.address": to_draft.address}
        ) as on_address,
        services.coordinator("off", {"fan_out": 0, "target.address": to_target.address}) as off_address,
        Client(on_address) as on,
        Client(off_address) as off,
    ):
        place = DelayedServices(FAST, 0.7, on, off, (to_target, to_draft))
        cell = place.measure(10.0, 0.0, match=0.7, generations=1, tokens=24)
    # A round can't be shorter than T_verify and a round trip: that much is no matter of load.
    assert cell.tokens_per_second <= cell.tokens_per_round * 1e3 / (FAST.verify_ms + 2 * 10.0)
    # Target-only runs ahead: no round trip stands between its steps.
    assert 1e3 / (FAST.verify_ms + 2 * 10.0) < cell.target_only_tokens_per_second <= 1e3 / FAST.verify_ms
    assert 0 < cell.of_perfect_cache <= cell.of_ideal


def test_a_part_of_the_grids_takes_its_own_cells_place_in_the_report(tmp_path: Path) -> None:
    def cell(one_way_ms: float, speed: float) -> Remote:
        names = Remote.__dataclass_fields__
        figures = dict.fromkeys(names, 1.0) | {"one_way_ms": one_way_ms, "tokens_per_second": speed}
        return Remote(**figures)  # type: ignore[arg-type]  # rounds and names are not looked at

    held = Results(({"command": "a"}, {"command": "b"}), remotes=(cell(1.0, 10.0), cell(20.0, 2.0)))
    file = tmp_path / "overlap-day.json"
    file.write_text(json.dumps(asdict(held)))
    loaded = Results.load(file)
    assert loaded == held
    newer = loaded.merge(Results(({"command": "b", "commit": "new"},), remotes=(cell(5.0, 6.0), cell(1.0, 11.0))))
    speeds = [(row.one_way_ms, row.tokens_per_second) for row in newer.remotes]
    assert speeds == [(1.0, 11.0), (5.0, 6.0), (20.0, 2.0)]
    assert newer.runs == ({"command": "a"}, {"command": "b", "commit": "new"})
    assert Results.load(tmp_path / "none.json") == Results()
    assert "| 11.000 |" in newer.markdown()
