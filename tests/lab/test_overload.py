"""What the overload's report says, of clients whose answers are known."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from random import Random

import pytest

from paceline_lab.bench.overload.__main__ import failures, figures, over, row, text_of
from paceline_lab.bench.overload.run import AFTER, NORMAL, STORM, OverloadRun, Phase, run_steady, run_storm
from paceline_lab.bench.resources import KINDS, Drift, ResourceWatch
from paceline_lab.bench.users import GRPC, HTTP, RequestOutcome, UserRequest

GAP_S = 0.02


def served(protocol: str = GRPC, sent_s: float = 0.0, gap_s: float = GAP_S) -> UserRequest:
    arrivals = [sent_s + gap_s * (place + 1) for place in range(4)]
    return UserRequest(protocol, sent_s, RequestOutcome.SERVED, arrivals, [[1]] * 4, arrivals[-1])


def refused(sent_s: float, hint_ms: float | None = 500.0) -> UserRequest:
    return UserRequest(HTTP, sent_s, RequestOutcome.REFUSED, ended_s=sent_s + 0.001, hint_ms=hint_ms)


def overload_run(storm: list[UserRequest], after: list[UserRequest]) -> OverloadRun:
    phases = {
        NORMAL: Phase(NORMAL, 0.0, 10.0, [served() for _ in range(100)]),
        STORM: Phase(STORM, 10.0, 20.0, storm),
        AFTER: Phase(AFTER, 20.0, 30.0, after),
    }
    return OverloadRun(10.0, phases, {}, {NORMAL: 10.0, STORM: 20.0, AFTER: 30.0})


def test_a_storm_is_compared_with_what_was_before_it() -> None:
    slower = [served(HTTP, 12.0, 1.5 * GAP_S) for _ in range(90)]
    run = overload_run([*slower, *(refused(15.0) for _ in range(910))], [refused(20.5), served(GRPC, 21.0)])
    assert over(run, 50, STORM) == pytest.approx(1.5)
    values = figures(run)
    assert values["came in the storm, times that"] == pytest.approx(10.0)
    assert values["served in the storm, of the capacity"] == pytest.approx(0.9)
    assert values["recovered, seconds"] == pytest.approx(0.501)
    assert row(run.phases[STORM], HTTP)["refusal p50 ms"] == "1.0"
    assert failures(run) == []
    assert text_of(run).startswith("# Overload\n")


@pytest.mark.parametrize(
    "request_of_the_storm",
    [
        replace(served(), outcome=RequestOutcome.CHANGED),
        replace(served(), outcome=RequestOutcome.LOST, why="gone"),
        refused(15.0, None),
    ],
)
def test_what_must_not_be_is_noticed(request_of_the_storm: UserRequest) -> None:
    assert len(failures(overload_run([request_of_the_storm], []))) == 1


async def test_a_storm_comes_whatever_becomes_of_it_and_users_come_again_when_told() -> None:
    places, asked_at = asyncio.Semaphore(2), list[float]()

    async def ask(number: int) -> UserRequest:
        user = UserRequest(GRPC, time.perf_counter())
        if places.locked():
            return user.end(RequestOutcome.REFUSED, hint_ms=20.0)
        async with places:
            await asyncio.sleep(0.02)
        asked_at.append(user.sent_s)
        return user.end(RequestOutcome.SERVED)

    async with asyncio.TaskGroup() as group:
        storm = await run_storm([ask, ask], 500.0, 0.3, 1, group)
    storm.take_in()
    assert 100 < len(storm.requests) < 200
    assert len(storm.of(RequestOutcome.SERVED)) + len(storm.of(RequestOutcome.REFUSED)) == len(storm.requests)
    assert len(storm.of(RequestOutcome.REFUSED)) > len(storm.of(RequestOutcome.SERVED)) > 10
    calm = await run_steady(NORMAL, [ask], 2, 0.2)
    assert not calm.of(RequestOutcome.REFUSED)
    crowded = await run_steady(NORMAL, [ask], 4, 0.2)
    assert 2 <= len(crowded.of(RequestOutcome.REFUSED)) <= 60, "each of them waits for its hint"


def test_growth_is_told_from_noise_and_single_peaks() -> None:
    source = Random(3)
    seconds = [0.5 * place for place in range(120)]
    noise = [100 + source.gauss(0, 1) for _ in seconds]
    assert Drift.of(seconds, noise).low <= 0
    grows = [value + 2 * at_s / 60 for value, at_s in zip(noise, seconds, strict=True)]
    drift = Drift.of(seconds, grows)
    assert 0 < drift.low <= 2 <= drift.high
    peaked = [value + 400 * (place % 40 == 39) for place, value in enumerate(noise)]
    assert Drift.of(seconds, peaked).low <= 0
    assert Drift.of([1.0], [1.0]) == Drift(0.0, 0.0, 0.0)


async def test_processes_are_sampled_and_one_that_is_gone_is_not() -> None:
    watch = ResourceWatch(period_s=0.01)
    watch.sample({"self": os.getpid(), "gone": 2**22 + 1})
    held = watch.samples["self"]
    assert [len(held.values[kind]) for kind in KINDS] == [1, 1, 1]
    assert all(held.values[kind][0] > 0 for kind in KINDS)
    assert watch.samples["gone"].at_s == []
    assert held.between(-1.0, 0.0 - 1e-9).at_s == []
