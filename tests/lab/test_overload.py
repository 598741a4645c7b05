"""What the overload's report says, of clients whose answers are known."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from random import Random

import pytest

from paceline_lab.bench.overload.__main__ import failures, figures, over, row, text_of
from paceline_lab.bench.overload.run import AFTER, NORMAL, STORM, Overloading, Phase, stormed, taken
from paceline_lab.bench.resources import KINDS, Drift, ResourceWatch
from paceline_lab.bench.users import CHANGED, GRPC, HTTP, LOST, REFUSED, SERVED, UserRequest

GAP_S = 0.02


def served(way: str = GRPC, sent_s: float = 0.0, gap_s: float = GAP_S) -> UserRequest:
    arrivals = [sent_s + gap_s * (place + 1) for place in range(4)]
    return UserRequest(way, sent_s, SERVED, arrivals, [[1]] * 4, arrivals[-1])


def refused(sent_s: float, hint_ms: float | None = 500.0) -> UserRequest:
    return UserRequest(HTTP, sent_s, REFUSED, ended_s=sent_s + 0.001, hint_ms=hint_ms)


def found(storm: list[UserRequest], after: list[UserRequest]) -> Overloading:
    phases = {
        NORMAL: Phase(NORMAL, 0.0, 10.0, [served() for _ in range(100)]),
        STORM: Phase(STORM, 10.0, 20.0, storm),
        AFTER: Phase(AFTER, 20.0, 30.0, after),
    }
    return Overloading(10.0, phases, {}, {NORMAL: 10.0, STORM: 20.0, AFTER: 30.0})


def test_a_storm_is_compared_with_what_was_before_it() -> None:
    slower = [served(HTTP, 12.0, 1.5 * GAP_S) for _ in range(90)]
    measured = found([*slower, *(refused(15.0) for _ in range(910))], [refused(20.5), served(GRPC, 21.0)])
    assert over(measured, 50, STORM) == pytest.approx(1.5)
    said = figures(measured)
    assert said["came in the storm, times that"] == pytest.approx(10.0)
    assert said["served in the storm, of the capacity"] == pytest.approx(0.9)
    assert said["recovered, seconds"] == pytest.approx(0.501)
    assert row(measured.phases[STORM], HTTP)["refusal p50 ms"] == "1.0"
    assert failures(measured) == []
    assert text_of(measured).startswith("# Overload\n")


@pytest.mark.parametrize(
    "wrong", [replace(served(), outcome=CHANGED), replace(served(), outcome=LOST, why="gone"), refused(15.0, None)]
)
def test_what_must_not_be_is_noticed(wrong: UserRequest) -> None:
    assert len(failures(found([wrong], []))) == 1


async def test_a_storm_comes_whatever_becomes_of_it_and_users_come_again_when_told() -> None:
    places, asked_at = asyncio.Semaphore(2), list[float]()

    async def ask(number: int) -> UserRequest:
        asked = UserRequest(GRPC, time.perf_counter())
        if places.locked():
            return asked.end(REFUSED, hint_ms=20.0)
        async with places:
            await asyncio.sleep(0.02)
        asked_at.append(asked.sent_s)
        return asked.end(SERVED)

    async with asyncio.TaskGroup() as group:
        storm = await stormed([ask, ask], 500.0, 0.3, 1, group)
    storm.take_in()
    assert 100 < len(storm.asked) < 200
    assert len(storm.of(SERVED)) + len(storm.of(REFUSED)) == len(storm.asked)
    assert len(storm.of(REFUSED)) > len(storm.of(SERVED)) > 10
    calm = await taken(NORMAL, [ask], 2, 0.2)
    assert not calm.of(REFUSED)
    crowded = await taken(NORMAL, [ask], 4, 0.2)
    assert 2 <= len(crowded.of(REFUSED)) <= 60, "each of them waits for its hint"


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
