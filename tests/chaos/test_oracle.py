"""The oracle without services: what it must catch, it catches."""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest

from tests.chaos import oracle
from tests.chaos.asking import Ended
from tests.chaos.blows import Moment
from tests.chaos.cluster import ChaosCluster, Held
from tests.chaos.faults import Fault, Kind
from tests.chaos.growth import Growth
from tests.chaos.oracle import LIMITS, Holdings, judge
from tests.chaos.requests import HTTP, Asked
from tests.chaos.resources import KINDS, Samples
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


@pytest.mark.parametrize("reason", ["HANGS", "LEFT", "INVALID_INPUT", "PEER_UNAVAILABLE"])
def test_a_request_without_a_text_is_lost(reason: str) -> None:
    assert len(judge(FAULT, UNDISTURBED, {COUPLED: Ended(error=reason)}).lost) == 1


def test_only_http_clients_of_a_struck_gateway_and_clients_that_leave_may_end_without_a_text() -> None:
    cut = Ended(error="PEER_UNAVAILABLE")
    at_gateway = replace(FAULT, peer="gateway", link="gateway")
    assert judge(at_gateway, UNDISTURBED, {OVER_HTTP: cut}).excused == 1
    assert len(judge(at_gateway, UNDISTURBED, {COUPLED: cut}).lost) == 1
    assert len(judge(FAULT, UNDISTURBED, {OVER_HTTP: cut}).lost) == 1
    assert judge(replace(FAULT, kind=Kind.LEAVE), UNDISTURBED, {COUPLED: Ended(error="LEFT")}).excused == 1


@pytest.mark.parametrize("name", LIMITS)
def test_what_a_process_holds_on_to_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "RELEASE_S", 0.02)
    held = Held(7, 20, 10, 1 << 27)
    stub, holdings = Stub(held), Holdings()
    cluster = cast(ChaosCluster, stub)
    assert holdings.check(cluster) == ()
    stub.now = replace(held, **{name: getattr(held, name) + LIMITS[name]})
    assert holdings.check(cluster) == ()
    stub.now = replace(held, **{name: getattr(held, name) + LIMITS[name] + 1})
    leaks = holdings.check(cluster)
    assert leaks and all(name in leak for leak in leaks)


class Stub:
    shape = PLAIN

    def __init__(self, now: Held) -> None:
        self.now = now

    def held(self, label: str) -> Held:
        return self.now


def followed(grows_a_minute: float, minutes: int = 40) -> Growth:
    source, growth = Random(1), Growth(0.0)
    samples = growth.watch.samples["target"] = Samples()
    samples.at_s = [10.0 * place for place in range(6 * minutes)]
    values = [200 + grows_a_minute * at_s / 60 + source.gauss(0, 0.5) for at_s in samples.at_s]
    samples.values = {kind: list(values) for kind in KINDS}
    return growth


@pytest.mark.parametrize(("grows_a_minute", "minutes", "told"), [(0.0, 40, False), (0.2, 40, True), (0.2, 5, False)])
def test_memory_that_grows_for_certain_is_told(grows_a_minute: float, minutes: int, told: bool) -> None:
    growth = followed(grows_a_minute, minutes)
    assert [failure.startswith("memory of target grows") for failure in growth.failures()] == [True] * told
    assert ("What must not be: none." in growth.text()) != told


def test_a_process_that_is_replaced_is_told_and_followed_anew() -> None:
    growth = followed(0.2)
    for pid in (os.getpid(), os.getppid()):
        growth.look({"target": pid})
    assert growth.failures() == ["target ended unasked"]
    assert len(growth.watch.samples["target"].at_s) == 1
