"""Which coordinator is asked, and what is said where none has a target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from paceline.protocol import errors
from paceline.protocol.errors import Overloaded, PacelineError, PeerUnavailable, Unauthenticated, UntrustedPeer
from paceline.protocol.generation import ModelDescription
from paceline.rpc.endpoints import Endpoint
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import Coordinator, Coordinators
from tests.gateway.description_service import TARGET, SteppedTime

CALLER = HttpCaller("r")
NEW_KEY = Unauthenticated("no such key")
Answer = bool | PacelineError | None
"""Whether a coordinator has a target, or how it fails; None: it gives no answer."""


class Answering:
    """A coordinator that describes itself under its address."""

    failed_at = 0.0
    request_count = 0

    def __init__(self, address: str, answer: Answer) -> None:
        self.address = address
        self._answer = answer

    def is_full(self, caller: HttpCaller) -> bool:
        return False

    async def describe(self, caller: HttpCaller) -> ModelDescription:
        if isinstance(self._answer, PacelineError):
            raise self._answer
        if self._answer is None:
            raise PeerUnavailable(f"{self.address} is gone")
        return ModelDescription(self.address, TARGET, TARGET, 99, (), self._answer, True)

    recent_description = describe


async def gateway_of(*answers: Answer) -> Coordinators:
    """Coordinators c0:1, c1:1, … in the gateway's own order: nothing runs at any of them."""
    gateway = Coordinators(GatewayConfig(coordinator_wait_ms=0), "t")
    await gateway._tasks.close()  # nobody looks for others
    members: Any = [Answering(f"c{place}:1", each) for place, each in enumerate(answers)]
    gateway.members = members
    return gateway


@pytest.mark.parametrize(
    ("answers", "name"), [([None, False, True], "c2:1"), ([False, False, None], "c1:1"), ([True, None], "c0:1")]
)
async def test_the_model_is_told_by_one_that_has_a_target_if_any_has(answers: list[Answer], name: str) -> None:
    assert (await (await gateway_of(*answers)).describe_models(CALLER)).name == name
    with pytest.raises(PeerUnavailable, match="c1:1 is gone"):
        await (await gateway_of(None, None)).describe_models(CALLER)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([], "no coordinator is found: coordinator.address = "),
        ([False, None], "c1:1 is gone"),
        ([None, False], "coordinator at c1:1: no link to its target yet"),
        ([True], "coordinator at c0:1: its target is another one"),
    ],
)
async def test_the_last_one_s_reason_is_said_where_none_serves(answers: list[Answer], why: str) -> None:
    with pytest.raises(PeerUnavailable, match=why):
        await (await gateway_of(*answers)).choose_now(CALLER, lambda upstream: False)


UNFIT = [
    UntrustedPeer("its certificate has expired"),
    errors.VocabularyMismatch("another tokenizer"),
    errors.InternalError("a defect"),
    Overloaded("gRPC's own"),
    errors.PermissionDenied("of another role"),
    errors.InvalidInput("what it says is malformed"),
]
each_unfit = pytest.mark.parametrize("failure", UNFIT, ids=lambda failure: type(failure).__name__)


@pytest.mark.parametrize("answer", [*UNFIT, NEW_KEY, False, None], ids=lambda answer: type(answer).__name__)
async def test_one_that_is_unfit_or_has_no_target_takes_no_request_from_one_that_serves(answer: Answer) -> None:
    gateway = await gateway_of(answer, True)
    assert (await gateway.choose(CALLER)).description.name == "c1:1"
    assert (await gateway.describe_models(CALLER)).name == "c1:1"
    await gateway.check()


async def test_a_refused_key_is_told_at_once_where_nobody_else_serves() -> None:
    gateway = await gateway_of(NEW_KEY, None)
    gateway.wait_s = 60
    async with asyncio.timeout(10):
        with pytest.raises(Unauthenticated):
            await gateway.choose(CALLER)


@each_unfit
async def test_what_may_pass_is_told_before_what_is_unfit_and_the_model_by_one_without_a_target(
    failure: PacelineError,
) -> None:
    assert (await (await gateway_of(failure, False)).describe_models(CALLER)).name == "c1:1"
    with pytest.raises(PeerUnavailable, match="c1:1 is gone"):
        await (await gateway_of(failure, None)).choose(CALLER)
    with pytest.raises(type(failure), match=failure.message):
        await (await gateway_of(failure)).choose(CALLER)


@asynccontextmanager
async def two_coordinators() -> AsyncIterator[tuple[Coordinators, Coordinator, Coordinator]]:
    """Two whom nobody answers for, and their gateway."""
    gateway = await gateway_of()
    gateway._update([Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2")])
    first, second = gateway.members
    try:
        yield gateway, first, second
    finally:
        await gateway.close()


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


@pytest.mark.parametrize("failure", [*UNFIT, NEW_KEY], ids=lambda failure: type(failure).__name__)
async def test_one_that_is_unfit_is_asked_last_for_a_while_and_one_that_refuses_a_key_as_before(
    failure: PacelineError,
) -> None:
    async with two_coordinators() as (gateway, first, second):
        first._query_client = cast(Any, Failing(failure))
        with pytest.raises(type(failure)):
            await first.describe(CALLER)
        assert gateway._by_preference(CALLER) == ([first, second] if failure is NEW_KEY else [second, first])


async def test_one_whose_certificate_ends_while_a_text_begins_is_asked_last() -> None:
    async with two_coordinators() as (gateway, first, second):
        with pytest.raises(UntrustedPeer), first.client(CALLER):
            raise UntrustedPeer("its certificate has expired")
        assert gateway._by_preference(CALLER) == [second, first]


async def test_one_without_room_is_asked_last_for_as_long_as_it_says_and_by_that_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, other_key = SteppedTime(), HttpCaller("r", api_key="k")
    monkeypatch.setattr("paceline_gateway.upstream.coordinators.time", clock)
    async with two_coordinators() as (gateway, first, second):

        def refuse(error: Overloaded, caller: HttpCaller = CALLER) -> None:
            with pytest.raises(Overloaded), first.client(caller):
                raise error

        refuse(Overloaded("the others' places", retry_after_ms=500), other_key)
        assert gateway._by_preference(CALLER) == [first, second]
        assert gateway._by_preference(other_key) == [second, first]
        clock.now += 0.5
        refuse(Overloaded("the key's", metadata={"limit": "requests_per_minute"}, retry_after_ms=500))
        assert gateway._by_preference(CALLER) == [first, second], "that says nothing of room"
        refuse(Overloaded("full", retry_after_ms=500))
        assert gateway._by_preference(CALLER) == [second, first]
        assert gateway._by_preference(other_key) == [first, second]
        second.request_count = 9
        assert gateway._by_preference(CALLER) == [second, first], "whatever runs there"
        clock.now += 0.5
        assert gateway._by_preference(CALLER) == [first, second]
        refuse(Overloaded("gRPC's own, without a hint"))
        assert gateway._by_preference(CALLER) == [second, first]


async def test_one_that_vanishes_as_the_gateway_closes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = Coordinator.close

    async def noted(self: Coordinator) -> None:
        closed.append(self.address)
        await close(self)

    monkeypatch.setattr(Coordinator, "close", noted)
    async with two_coordinators() as (gateway, *_):
        gateway._update([Endpoint("127.0.0.1:2")])
    assert sorted(closed) == ["127.0.0.1:1", "127.0.0.1:2"]
