"""Which coordinator is asked, and what is said where none has a target."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.caller import HttpCaller
from gateway.coordinators import Coordinator, Coordinators
from paceline.protocol.errors import Overloaded, PeerUnavailable
from paceline.protocol.generation import ModelDescription
from paceline.protocol.handshake import Fingerprint
from paceline.rpc.endpoints import Endpoint
from paceline.runtime.gateway_config import GatewayConfig

CALLER = HttpCaller("r")
TARGET = Fingerprint("m", "t", 99, "n")


class Answering:
    """A coordinator that describes itself under its address; `ready`: whether it has a target, None: no answer."""

    def __init__(self, address: str, ready: bool | None) -> None:
        self.address = address
        self._ready = ready

    async def ask(self, caller: HttpCaller) -> ModelDescription:
        if self._ready is None:
            raise PeerUnavailable(f"{self.address} is gone")
        return ModelDescription(self.address, TARGET, TARGET, 99, (), self._ready, True)

    described = ask


@asynccontextmanager
async def gateway_of(*ready: bool | None) -> AsyncIterator[Coordinators]:
    known = Coordinators(GatewayConfig(coordinator_wait_ms=0), "t")
    several: Sequence[Any] = [Answering(f"c{place}:1", each) for place, each in enumerate(ready)]
    known._in_order = lambda caller: [*several]  # type: ignore[method-assign]
    try:
        yield known
    finally:
        await known.close()


@pytest.mark.parametrize(
    ("ready", "told"), [([None, False, True], "c2:1"), ([False, False, None], "c1:1"), ([True, None], "c0:1")]
)
async def test_the_model_is_told_by_one_that_has_a_target_if_any_has(ready: list[bool | None], told: str) -> None:
    async with gateway_of(*ready) as known:
        assert (await known.models(CALLER)).name == told


@pytest.mark.parametrize(
    ("ready", "why"),
    [
        ([], "no coordinator is found: coordinator.address = "),
        ([False, None], "c1:1 is gone"),
        ([None, False], "coordinator at c1:1: no link to its target yet"),
        ([True], "coordinator at c0:1: its target is another one"),
    ],
)
async def test_the_last_one_s_reason_is_said_where_none_serves(ready: list[bool | None], why: str) -> None:
    async with gateway_of(*ready) as known:
        with pytest.raises(PeerUnavailable, match=why):
            await known.first_serving(CALLER, lambda serving: False)


async def test_the_model_is_not_told_where_nobody_answers() -> None:
    async with gateway_of(None, None) as known:
        with pytest.raises(PeerUnavailable, match="c1:1 is gone"):
            await known.models(CALLER)


class TheTime:
    """As `gateway.coordinators` sees it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def test_one_without_room_is_asked_last_for_as_long_as_it_says_and_by_that_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, other_key = TheTime(), HttpCaller("r", api_key="k")
    monkeypatch.setattr("gateway.coordinators.time", time)
    async with gateway_of() as known:
        del known._in_order
        known._update([Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2")])
        first, second = known.all

        def refuse(error: Overloaded, caller: HttpCaller = CALLER) -> None:
            with pytest.raises(Overloaded), first.client(caller):
                raise error

        refuse(Overloaded("the others' places", retry_after_ms=500), other_key)
        assert (known._in_order(CALLER), known._in_order(other_key)) == ([first, second], [second, first])
        time.now += 0.5
        refuse(Overloaded("the key's", metadata={"limit": "requests_per_minute"}, retry_after_ms=500))
        assert known._in_order(CALLER) == [first, second], "that says nothing of room"
        refuse(Overloaded("full", retry_after_ms=500))
        assert known._in_order(CALLER) == [second, first]
        assert known._in_order(other_key) == [first, second]
        second.running = 9
        assert known._in_order(CALLER) == [second, first], "whatever runs there"
        time.now += 0.5
        assert known._in_order(CALLER) == [first, second]
        refuse(Overloaded("gRPC's own, without a hint"))
        assert known._in_order(CALLER) == [second, first]


async def test_one_that_vanishes_as_the_gateway_closes_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    close = Coordinator.close

    async def noted(self: Coordinator) -> None:
        closed.append(self.address)
        await close(self)

    monkeypatch.setattr(Coordinator, "close", noted)
    async with gateway_of() as known:
        known._update([Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2")])
        known._update([Endpoint("127.0.0.1:2")])
    assert sorted(closed) == ["127.0.0.1:1", "127.0.0.1:2"]
