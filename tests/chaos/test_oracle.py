"""The oracle without services: what it must catch, it catches."""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.chaos import oracle
from tests.chaos.blows import Moment
from tests.chaos.cluster import ChaosCluster, Held
from tests.chaos.faults import Fault, Kind
from tests.chaos.growth import KINDS, Drift, Growth, Samples
from tests.chaos.oracle import LIMITS, Holdings, judge
from tests.chaos.requests import HTTP, Asked, Ended
from tests.chaos.shapes import PLAIN
from tests.chaos.states import State

FAULT = Fault(1, Kind.CUT, "target", "target", State.VERDICT, Moment.BEFORE, 0, 0.0, 0)
COUPLED, LAW, OVER_HTTP = Asked("model", 0), Asked("rejection", 0), Asked(HTTP, 0)
UNDISTURBED = {
    COUPLED: Ended((1, 2), "ab", (), "length"),
    LAW: Ended((1,) * 48, "a", (), "length"),
    OVER_HTTP: Ended((), "ab", (), "length"),
}


@pytest.mark.parametrize(
    "change", [{"token_ids": (1, 3)}, {"text": "ac"}, {"logprobs": (0.5,)}, {"reason": "stop"}, {"token_ids": (1,)}]
)
def test_a_text_that_changed_is_told(change: dict[str, Any]) -> None:
    assert judge(FAULT, UNDISTURBED, UNDISTURBED).changed == ()
    assert len(judge(FAULT, UNDISTURBED, {COUPLED: replace(UNDISTURBED[COUPLED], **change)}).changed) == 1


def test_a_text_by_law_may_differ_and_not_end_early() -> None:
    other, short = (replace(UNDISTURBED[LAW], token_ids=ids) for ids in ((2,) * 48, (1,) * 47))
    assert judge(FAULT, UNDISTURBED, {LAW: other}).changed == ()
    assert len(judge(FAULT, UNDISTURBED, {LAW: short}).changed) == 1


def test_a_request_without_a_text_is_lost_but_for_http_at_a_struck_gateway_and_clients_that_leave() -> None:
    for reason in ("HANGS", "LEFT", "INVALID_INPUT", "PEER_UNAVAILABLE"):
        assert len(judge(FAULT, UNDISTURBED, {COUPLED: Ended(error=reason)}).lost) == 1
    cut, at_gateway = Ended(error="PEER_UNAVAILABLE"), replace(FAULT, peer="gateway", link="gateway")
    assert judge(at_gateway, UNDISTURBED, {OVER_HTTP: cut}).excused == 1
    assert len(judge(at_gateway, UNDISTURBED, {COUPLED: cut}).lost) == 1
    assert len(judge(FAULT, UNDISTURBED, {OVER_HTTP: cut}).lost) == 1
    assert judge(replace(FAULT, kind=Kind.LEAVE), UNDISTURBED, {COUPLED: Ended(error="LEFT")}).excused == 1


@pytest.mark.parametrize("name", LIMITS)
def test_what_a_process_holds_on_to_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "RELEASE_S", 0.02)
    held, holdings = Held(7, 20, 10, 1 << 27), Holdings()

    def leaks(more: int) -> tuple[str, ...]:
        now = replace(held, **{name: getattr(held, name) + more})
        return holdings.check(cast(ChaosCluster, SimpleNamespace(shape=PLAIN, held=lambda label: now)))

    assert leaks(0) == leaks(LIMITS[name]) == ()
    told = leaks(LIMITS[name] + 1)
    assert told and all(name in leak for leak in told)


def followed(grows_a_minute: float, minutes: int = 40) -> Growth:
    source, growth = Random(1), Growth(0.0)
    samples = growth.samples["target"] = Samples()
    samples.at_s = [10.0 * place for place in range(6 * minutes)]
    values = [200 + grows_a_minute * at_s / 60 + source.gauss(0, 0.5) for at_s in samples.at_s]
    samples.values = {kind: list(values) for kind in KINDS}
    return growth


@pytest.mark.parametrize(("grows_a_minute", "minutes", "told"), [(0.0, 40, False), (0.2, 40, True), (0.2, 5, False)])
def test_memory_that_grows_for_certain_is_told(grows_a_minute: float, minutes: int, told: bool) -> None:
    growth = followed(grows_a_minute, minutes)
    assert [failure.startswith("memory of target grows") for failure in growth.failures()] == [True] * told
    assert ("What must not be: none." in growth.text()) != told


def test_a_process_that_is_replaced_or_gone_is_followed_anew_or_not() -> None:
    growth = followed(0.2)
    for pid in (os.getpid(), os.getppid()):
        growth.look({"target": pid, "gone": 2**22 + 1})
    assert growth.failures() == ["target ended unasked"]
    held = growth.samples["target"]
    assert [len(held.values[kind]) for kind in KINDS] == [1, 1, 1] and len(held.at_s) == 1
    assert all(held.values[kind][0] > 0 for kind in KINDS)
    assert growth.samples["gone"].at_s == []


def test_growth_is_told_from_noise_and_single_peaks() -> None:
    source, seconds = Random(3), [0.5 * place for place in range(120)]
    noise = [100 + source.gauss(0, 1) for _ in seconds]
    assert Drift.of(seconds, noise).low <= 0
    drift = Drift.of(seconds, [value + 2 * at_s / 60 for value, at_s in zip(noise, seconds, strict=True)])
    assert 0 < drift.low <= 2 <= drift.high
    assert Drift.of(seconds, [value + 400 * (place % 40 == 39) for place, value in enumerate(noise)]).low <= 0
    assert Drift.of([1.0], [1.0]) == Drift(0.0, 0.0, 0.0)
