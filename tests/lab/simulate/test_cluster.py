"""Small clusters beside what is worked out by hand: queues, KV rows, prefixes, failures, limits, cells."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest

from paceline_lab.simulate.cluster import CellRecord, run_cell, run_cells
from paceline_lab.simulate.lanes import Processor, TimedLane
from paceline_lab.simulate.outcome import ClusterOutcome, outcome
from paceline_lab.simulate.scenario import Scenario
from paceline_lab.simulate.specs import Delay
from paceline_lab.simulate.virtual_time import run_virtually

STEP_MS = 10.0
FLAT: Mapping[str, Any] = {"step": [[1, STEP_MS]], "link": {"ms": 0}}
QUICK_DRAFT: Mapping[str, Any] = {"step": [[1, 2.0]], "link": {"ms": 0}}


def scenario(
    *, traffic: Mapping[str, Any] | Sequence[Mapping[str, Any]], target: Mapping[str, Any] | None = None, **more: Any
) -> Scenario:
    """One target of flat steps, target-only, without delays, unless something else is said."""
    kinds = [traffic] if isinstance(traffic, Mapping) else [*traffic]
    values: dict[str, Any] = {
        "warmup_seconds": 0,
        "coordinators": {"round_ms": 0},
        "speculation": {"k": "0"},
        "targets": [{**FLAT, **(target or {})}],
        "traffic": [{"prompt_tokens": {"median": 1}, "answer_tokens": {"median": 10}, **each} for each in kinds],
    }
    return Scenario.model_validate(values | more)


def simulated(found: Scenario) -> CellRecord:
    (record,) = run_cells(found)
    return record


@pytest.mark.full
def test_requests_one_at_a_time_wait_as_long_as_the_formula_of_an_m_d_1_queue_says() -> None:
    """Each takes 2 steps of 50 ms; at half of what the target can do the mean wait is ρ·D / 2(1 − ρ) = 50 ms."""
    record = simulated(
        scenario(
            target={"step": [[1, 50.0]], "max_sessions": 1, "max_queue": 10_000},
            traffic={"requests_per_second": 5.0, "answer_tokens": {"median": 2}},
            seconds=200.0,
            seed=1,
        )
    )
    waits = [each.first_ms - each.arrival_ms - 50.0 for each in record.totals]
    assert len(waits) > 900
    # The mean of so many waits has a standard error of about 6 %.
    assert statistics.mean(waits) == pytest.approx(50.0, rel=0.18)


def arrivals(tmp_path: Any, *seconds: float) -> str:
    file = tmp_path / "arrivals.txt"
    file.write_text("".join(f"{each}\n" for each in seconds))
    return str(file)


def first_tokens_ms(record: CellRecord) -> list[float]:
    return [round(each.first_ms, 6) for each in sorted(record.totals, key=lambda each: each.arrival_ms)]


def test_a_session_without_kv_rows_waits_until_another_has_ended(tmp_path: Any) -> None:
    """A session reserves 1 + 10 + 64 rows: two fit in 150. The third begins when the first ends, after 10 steps."""
    came = {"arrivals": arrivals(tmp_path, 0, 0, 0)}
    record = simulated(scenario(target={"kv_rows": 150}, traffic=came))
    first, second, third = first_tokens_ms(record)
    assert (first, third) == (10.0, 10 * STEP_MS + 10.0)
    assert second <= 20.0
    assert record.most_waiting >= 1
    roomy = simulated(scenario(target={"kv_rows": 225}, traffic=came))
    assert first_tokens_ms(roomy)[2] <= 20.0
    assert roomy.most_waiting == 0


def test_requests_beyond_the_queue_are_refused_and_counted(tmp_path: Any) -> None:
    found = scenario(target={"max_sessions": 1, "max_queue": 2}, traffic={"arrivals": arrivals(tmp_path, *[0.0] * 5)})
    result = outcome(found, run_cells(found))
    assert (result.requests, result.refused) == (5, 2)


def test_a_prefix_is_computed_once(tmp_path: Any) -> None:
    """256 rows in chunks of 128 take two steps, the first round rides with the second; then the prefix is there."""
    found = scenario(
        target={"prefill_chunk": 128},
        traffic={"arrivals": arrivals(tmp_path, 0.0, 1.0), "prompt_tokens": {"median": 257}, "prefix_tokens": 256},
    )
    first, second = first_tokens_ms(simulated(found))
    assert (first, second) == (20.0, 1010.0)


def test_a_failed_draft_costs_no_request() -> None:
    """Perfect drafts: 5 tokens in 10 ms and 4 levels of 2 ms. From the failure on a token a step."""
    found = scenario(
        traffic={"sessions": 1, "acceptance": 1.0, "answer_tokens": {"median": 1000}},
        drafts=[QUICK_DRAFT],
        speculation={"k": "4", "lease": 0},
        failures=[{"service": "draft", "at_seconds": 1.5, "down_seconds": 1000}],
        seconds=2.0,
    )
    (totals,) = simulated(found).totals
    assert (totals.tokens, totals.refused) == (1000, False)
    begun = totals.arrival_ms
    # The first level of a round has the row of the token before, too, at no cost on a flat line.
    drafted = 5 * (1500 - begun) / (STEP_MS + 4 * 2.0)
    assert totals.end_ms == pytest.approx(1500 + (1000 - drafted) * STEP_MS, rel=0.02)


@pytest.mark.parametrize(
    ("service", "down_seconds", "more", "lost"),
    [
        ("target", 1, {"target": {"count": 2}}, range(1, 4)),
        ("coordinator", 100, {"coordinators": {"count": 2, "round_ms": 0}}, range(2, 3)),
    ],
)
def test_requests_of_a_failed_service_go_on_at_another_one(
    service: str, down_seconds: float, more: Mapping[str, Any], lost: range
) -> None:
    found = scenario(
        traffic={"sessions": 4, "answer_tokens": {"median": 200}},
        failures=[{"service": service, "at_seconds": 1.5, "down_seconds": down_seconds}],
        seconds=1.2,
        **more,
    )
    record = simulated(found)
    assert [each.tokens for each in record.totals] == [200] * 4
    assert record.lost_sessions in lost


@pytest.mark.parametrize("k", ["0", pytest.param("4", marks=pytest.mark.full)])
def test_two_coordinators_that_share_a_target_share_its_steps(k: str) -> None:
    """Steps are flat: whoever's the sessions are, each step serves all, and goodput is the same."""

    def run(coordinators: int) -> ClusterOutcome:
        found = scenario(
            traffic={"sessions": 4, "answer_tokens": {"median": 48}, "acceptance": 0.8},
            drafts=[QUICK_DRAFT],
            coordinators={"count": coordinators, "round_ms": 0},
            speculation={"k": k},
            seconds=1.5,
            warmup_seconds=0.75,
        )
        return outcome(found, run_cells(found))

    one, two = run(1), run(2)
    assert two.tokens_per_second == pytest.approx(one.tokens_per_second, rel=0.1)
    if k == "0":
        assert two.tokens_per_second == pytest.approx(4 / STEP_MS * 1e3, rel=0.1)


def test_a_coordinators_own_time_bounds_its_rounds() -> None:
    """2 ms a round leave a coordinator 500 rounds a second, and two of them up to twice as many."""

    def rate(coordinators: int) -> float:
        found = scenario(
            traffic={"sessions": 16, "answer_tokens": {"median": 100}},
            coordinators={"count": coordinators, "round_ms": 2},
            speculation={"k": "0", "lease": 0},
            seconds=3.0,
            warmup_seconds=1.0,
        )
        return outcome(found, run_cells(found)).tokens_per_second

    assert rate(1) == pytest.approx(500, rel=0.03)
    assert 550 < rate(2) < 1000


@pytest.mark.full
def test_ten_cells_are_one_cell_ten_times() -> None:
    def speed(simulated_cells: int, seconds: float) -> ClusterOutcome:
        found = scenario(
            target={"step": [[1, 50.0]]},
            traffic={"requests_per_second": 8.0, "answer_tokens": {"median": 2}},
            cells=10,
            simulated_cells=simulated_cells,
            seconds=seconds,
            warmup_seconds=seconds / 10,
        )
        return outcome(found, run_cells(found))

    few, all_of_them = speed(1, 30.0), speed(10, 4.0)
    # Poisson arrivals: 216 and 288 requests are counted, whose rates have a standard error of 9 % together.
    assert few.tokens_per_second == pytest.approx(all_of_them.tokens_per_second, rel=0.25)
    assert few.tokens_per_second == pytest.approx(10 * 8 * 2, rel=0.25)
    assert few.groups[0].tpot_p50_ms == pytest.approx(50.0)
    assert all_of_them.groups[0].tpot_p50_ms == pytest.approx(50.0)


def test_a_tenant_beyond_its_limit_is_refused_as_keys_are() -> None:
    """A minute's worth is there at the start and fills by one a second: 60 + 30 of about 300."""
    traffic = {"requests_per_second": 10.0, "requests_per_minute": 60, "answer_tokens": {"median": 2}}
    found = scenario(traffic=traffic, seconds=30.0)
    totals = simulated(found).totals
    assert sum(not each.limited for each in totals) == pytest.approx(60 + 30, abs=1)
    assert sum(each.limited for each in totals) > 150


@pytest.mark.timeout(30)
def test_a_refused_session_comes_again_after_a_pause() -> None:
    """A pause of 500 ms: two refusals a second of each of the sessions that find no place."""
    full: dict[str, Any] = {"traffic": {"sessions": 6}, "coordinators": {"round_ms": 0, "max_requests": 4}}
    totals = simulated(scenario(**full, seconds=3.0)).totals
    came = [each.arrival_ms for each in totals if each.refused]
    assert 5 <= len(came) <= 2 * 2 * 3 + 2
    assert len({*came}) == len(came), "none comes at the moment at which it was refused"
    assert max(each.arrival_ms for each in totals) > 2500
    assert max(each.end_ms for each in totals if not each.refused) > 2900


@pytest.mark.timeout(30)
def test_a_session_beyond_its_tenants_limit_comes_again_when_there_is_room() -> None:
    """20 at once and one each 3 s: 20 + 60 ÷ 3 within a minute, to the end of it."""
    found = scenario(traffic={"sessions": 4, "requests_per_minute": 20}, seconds=60.0)
    totals = simulated(found).totals
    served = [each.arrival_ms for each in totals if not each.limited]
    assert len(served) == pytest.approx(20 + 20, abs=1)
    assert max(served) > 55_000
    # Each of the others waits as long as the error says, so it asks a few times for each request that is served.
    assert sum(each.limited for each in totals) <= 4 * len(served)


def test_shares_of_requests_time_are_of_the_time_behind_their_first_rounds() -> None:
    """The draft computes 6000 rows of each prompt while 16 tokens take some 5 rounds."""
    found = scenario(
        target={"prefill_chunk": 8192},
        traffic={"sessions": 2, "prompt_tokens": {"median": 6000}, "answer_tokens": {"median": 16}},
        drafts=[{**QUICK_DRAFT, "prefill_chunk": 256}],
        speculation={"k": "4"},
        seconds=2.0,
    )
    cells = run_cells(found)
    result = outcome(found, cells)
    assert sum(each.drafted_rounds for each in cells[0].totals) > 20
    assert result.waiting_for_drafts + result.queueing + result.stepping <= 1.001
    for each in cells[0].totals:
        assert each.waited_ms + each.queue_ms + each.step_ms <= each.end_ms - each.first_ms + 1e-6


def test_unfinished_requests_are_told_of_each_kind_of_traffic() -> None:
    """A target does 10 requests of 100 ms a second, one by one, and 20 come: half are left when time is over."""
    found = scenario(
        target={"max_sessions": 1, "max_queue": 1000},
        traffic=[{"name": name, "requests_per_second": 10.0} for name in ("one", "other")],
        seconds=6.0,
        warmup_seconds=2.0,
        drain_seconds=0.1,
    )
    cells = run_cells(found)
    result = outcome(found, cells)
    left = [sum(totals.group == kind for totals in cells[0].running) for kind in range(2)]
    assert sum(left) == pytest.approx(60, abs=20) and min(left) > 10
    assert 0 < result.unfinished <= sum(left)


def test_targets_come_when_load_is_high_and_are_paid_for() -> None:
    found = scenario(
        target={"count": 3, "step": [[1, 100.0]]},
        traffic={"sessions": 8, "answer_tokens": {"median": 10}},
        autoscaling={"least": 1, "up_above": 3, "down_below": 1, "every_seconds": 1, "start_seconds": 4},
        seconds=20.0,
    )
    record = run_cell(found, 0)
    # One from the start; from 1 s on a second one is started, and there at 5 s. New sessions go there: 4 each, which
    # is above 3, so the third one is started at the next look, once none is starting.
    assert record.target_ms == pytest.approx(1e3 * (20 + 19 + 15), rel=0.06)


def test_messages_of_a_link_stay_in_order_and_have_the_stated_median() -> None:
    delay, random = Delay(2.0, 10.0), Random(3)
    drawn = [delay.draw_ms(random) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(2.0, rel=0.08)
    assert statistics.quantiles(drawn, n=100)[98] == pytest.approx(10.0, rel=0.2)

    async def run() -> list[tuple[int, float]]:
        loop = asyncio.get_running_loop()
        begun, arrived = loop.time(), list[tuple[int, float]]()
        lane = TimedLane(loop, lambda: delay.draw_ms(random), Processor(loop), lambda frame: 0.5, lambda: None)
        for number in range(200):
            await lane.write(number)
        for _ in range(200):
            arrived.append((await lane.read(), loop.time() - begun))
        return arrived

    numbers, times = zip(*run_virtually(run), strict=True)
    assert numbers == tuple(range(200))
    # One after the other is dealt with, each in half a second.
    assert times[-1] == pytest.approx(0.5 * 200, abs=10.0)
    assert all(later - earlier >= 0.5 - 1e-9 for earlier, later in itertools.pairwise(times))


def test_what_bounds_a_cluster_is_named() -> None:
    def bottleneck(found: Scenario) -> str:
        return outcome(found, run_cells(found)).bottleneck

    crowd = {"sessions": 16, "answer_tokens": {"median": 100}}
    rows = scenario(target={"step": [[1, 10], [17, 26]]}, traffic=crowd, seconds=1.5)
    assert bottleneck(rows).startswith("rows of target steps")
    busy = scenario(traffic=crowd, coordinators={"round_ms": 2}, speculation={"k": "0", "lease": 0}, seconds=4.0)
    assert bottleneck(busy).startswith("coordinators")
    short = scenario(target={"kv_rows": 400}, traffic=crowd, seconds=2.0)
    assert bottleneck(short).startswith("KV rows")
    slow = scenario(traffic=crowd, drafts=[{"step": [[1, 5], [17, 80]]}], speculation={"k": "4"}, seconds=2.0)
    assert bottleneck(slow).startswith("drafts")
    assert bottleneck(scenario(traffic={"sessions": 1}, seconds=2.0)).startswith("none")
