"""Which coordinator is asked, and what is said where none has a target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from paceline.protocol.errors import (
    InternalError,
    InvalidInput,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    PermissionDenied,
    Unauthenticated,
    UntrustedPeer,
    VocabularyMismatch,
)
from paceline.protocol.generation import ModelDescription
from paceline.protocol.handshake import Fingerprint
from paceline.rpc.endpoints import Endpoint
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import Coordinator, Coordinators

CALLER = HttpCaller("r")
TARGET = Fingerprint("m", "t", 99, "n")


class Answering:
    """A coordinator that describes itself under its address; `ready`: whether it has a target, None: no answer."""

    failed_at = 0.0

    def __init__(self, address: str, ready: bool | PacelineError | None, request_count: int = 0) -> None:
        self.address = address
        self.request_count = request_count
        self._ready = ready

    def is_full(self, caller: HttpCaller) -> bool:
        return False

    async def describe(self, caller: HttpCaller) -> ModelDescription:
        if isinstance(self._ready, PacelineError):
            raise self._ready
        if self._ready is None:
            raise PeerUnavailable(f"{self.address} is gone")
        return ModelDescription(self.address, TARGET, TARGET, 99, (), self._ready, True)

    recent_description = describe


@asynccontextmanager
async def gateway_of(*ready: bool | None) -> AsyncIterator[Coordinators]:
    known = Coordinators(GatewayConfig(coordinator_wait_ms=0), "t")
    several: Sequence[Any] = [Answering(f"c{place}:1", each) for place, each in enumerate(ready)]
    known._by_preference = lambda caller: [*several]  # type: ignore[method-assign]
    try:
        yield known
    finally:
        await known.close()


@pytest.mark.parametrize(
    ("ready", "told"), [([None, False, True], "c2:1"), ([False, False, None], "c1:1"), ([True, None], "c0:1")]
)
async def test_the_model_is_told_by_one_that_has_a_target_if_any_has(ready: list[bool | None], told: str) -> None:
    async with gateway_of(*ready) as known:
        assert (await known.describe_models(CALLER)).name == told


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
            await known.choose_now(CALLER, lambda upstream: False)


async def test_the_model_is_not_told_where_nobody_answers() -> None:
    async with gateway_of(None, None) as known:
        with pytest.raises(PeerUnavailable, match="c1:1 is gone"):
            await known.describe_models(CALLER)


UNFIT = [
    UntrustedPeer("its certificate has expired"),
    VocabularyMismatch("another tokenizer"),
    InternalError("a defect"),
    Overloaded("gRPC's own"),
    PermissionDenied("of another role"),
    InvalidInput("what it says is malformed"),
]


@asynccontextmanager
async def gateway_beside(failure: PacelineError, other: bool | None) -> AsyncIterator[Coordinators]:
    """Two coordinators in the gateway's own order: one that fails comes first, since nothing runs there."""
    known = Coordinators(GatewayConfig(coordinator_wait_ms=0), "t")
    await known._tasks.close()  # nobody looks for others
    several: Any = [Answering("good:1", other, request_count=3), Answering("bad:1", failure)]
    known.members = several
    yield known


@pytest.mark.parametrize("failure", UNFIT, ids=lambda failure: type(failure).__name__)
async def test_one_that_is_unfit_takes_no_request_from_one_that_serves(failure: PacelineError) -> None:
    async with gateway_beside(failure, True) as known:
        assert [each.address for each in known._by_preference(CALLER)] == ["bad:1", "good:1"]
        assert (await known.choose(CALLER)).description.name == "good:1"
        assert (await known.describe_models(CALLER)).name == "good:1"
        await known.check()


async def test_a_key_that_one_refuses_is_asked_of_the_others() -> None:
    async with gateway_beside(Unauthenticated("no such key"), True) as known:
        assert [each.address for each in known._by_preference(CALLER)] == ["bad:1", "good:1"]
        assert (await known.choose(CALLER)).description.name == "good:1"
        assert (await known.describe_models(CALLER)).name == "good:1"


async def test_a_refused_key_is_told_at_once_where_nobody_else_serves() -> None:
    async with gateway_beside(Unauthenticated("no such key"), None) as known:
        known.wait_s = 60
        async with asyncio.timeout(10):
            with pytest.raises(Unauthenticated):
                await known.choose(CALLER)


@pytest.mark.parametrize("failure", UNFIT, ids=lambda failure: type(failure).__name__)
async def test_what_may_pass_is_told_before_what_is_unfit(failure: PacelineError) -> None:
    async with gateway_beside(failure, None) as known:
        with pytest.raises(PeerUnavailable, match="good:1 is gone"):
            await known.choose(CALLER)
        known.members = known.members[1:]
        with pytest.raises(type(failure), match=failure.message):
            await known.choose(CALLER)


@pytest.mark.parametrize("failure", UNFIT, ids=lambda failure: type(failure).__name__)
async def test_the_model_is_told_by_one_without_a_target_beside_one_that_is_unfit(failure: PacelineError) -> None:
    async with gateway_beside(failure, False) as known:
        assert (await known.describe_models(CALLER)).name == "good:1"


class Failing:
    """What a coordinator is asked by."""

    def __init__(self, failure: PacelineError) -> None:
        self._failure = failure

    def calling(self, api_key: str | None) -> Failing:
        return self

    async def describe_models(self) -> tuple[ModelDescription, ...]:
        raise self._failure

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("failure", UNFIT, ids=lambda failure: type(failure).__name__)
async def test_one_that_is_unfit_is_asked_last_for_a_while(failure: PacelineError) -> None:
    async with gateway_of() as known:
        del known._by_preference
        known._update([Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2")])
        first, second = known.members
        first._query_client = cast(Any, Failing(failure))
        with pytest.raises(type(failure)):
            await first.describe(CALLER)
        assert known._by_preference(CALLER) == [second, first]


async def test_one_that_refuses_a_key_is_asked_as_before() -> None:
    async with gateway_of() as known:
        del known._by_preference
        known._update([Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2")])
        first, second = known.members
        first._query_client = cast(Any, Failing(Unauthenticated("no such key")))
        with pytest.raises(Unauthenticated):
            await first.describe(CALLER)
        assert known._by_preference(CALLER) == [first, second]


async def test_one_whose_certificate_ends_while_a_text_begins_is_asked_last() -> None:
    async with gateway_of() as known:
        del known._by_preference
        known._update([Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2")])
        first, second = known.members
        with pytest.raises(UntrustedPeer), first.client(CALLER):
            raise UntrustedPeer("its certificate has expired")
        assert known._by_preference(CALLER) == [second, first]


class TheTime:
    """As `paceline_gateway.upstream.coordinators` sees it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def test_one_without_room_is_asked_last_for_as_long_as_it_says_and_by_that_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, other_key = TheTime(), HttpCaller("r", api_key="k")
    monkeypatch.setattr("paceline_gateway.upstream.coordinators.time", time)
    async with gateway_of() as known:
        del known._by_preference
        known._update([Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2")])
        first, second = known.members

        def refuse(error: Overloaded, caller: HttpCaller = CALLER) -> None:
            with pytest.raises(Overloaded), first.client(caller):
                raise error

        refuse(Overloaded("the others' places", retry_after_ms=500), other_key)
        assert (known._by_preference(CALLER), known._by_preference(other_key)) == ([first, second], [second, first])
        time.now += 0.5
        refuse(Overloaded("the key's", metadata={"limit": "requests_per_minute"}, retry_after_ms=500))
        assert known._by_preference(CALLER) == [first, second], "that says nothing of room"
        refuse(Overloaded("full", retry_after_ms=500))
        assert known._by_preference(CALLER) == [second, first]
        assert known._by_preference(other_key) == [first, second]
        second.request_count = 9
        assert known._by_preference(CALLER) == [second, first], "whatever runs there"
        time.now += 0.5
        assert known._by_preference(CALLER) == [first, second]
        refuse(Overloaded("gRPC's own, without a hint"))
        assert known._by_preference(CALLER) == [second, first]


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
