"""Connections without a whole request: who floods loses its own, and others are served."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.protocol.errors import Unauthenticated
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.http.connections import WaitingConnections
from paceline_gateway.http.guard import MAX_STARTING_REQUESTS
from paceline_gateway.upstream.caller import HttpCaller
from tests.gateway.test_connections import POST, SlowApp, all_of, opened, served
from tests.gateway.test_guard import GuardedApp


@dataclass(eq=False)
class Connection:
    """One of an address, dropped at once."""

    address: str
    among: WaitingConnections = field(repr=False)
    is_waiting: bool = True
    body_bytes: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        self.among.add(self)

    def drop(self, reason: str) -> None:
        self.reason = reason
        self.among.remove(self)


def waiting(**limits: int) -> WaitingConnections:
    return WaitingConnections(GatewayConfig.model_validate(limits), 100)


def test_the_address_that_has_most_loses_its_oldest() -> None:
    among = waiting(max_waiting_connections=4)
    other = Connection("other", among)
    flood = [Connection("flood", among) for _ in range(10)]
    assert [bool(each.reason) for each in flood] == [True] * 7 + [False] * 3
    assert not other.reason
    assert "max_waiting_connections: 4" in flood[0].reason


def test_what_runs_and_what_has_just_begun_a_request_stays() -> None:
    among = waiting(max_waiting_connections=3)
    first, runs, third = (Connection("a", among, is_waiting=is_waiting) for is_waiting in (True, False, True))
    among.renew(first)
    Connection("a", among)
    assert [bool(each.reason) for each in (first, runs, third)] == [False, False, True]
    among.remove(first)
    newest = [Connection("a", among, is_waiting=False) for _ in range(3)]
    assert not any(each.reason for each in newest), "nobody waits whom it could cost"


def test_bodies_that_are_not_let_in_are_bounded_together() -> None:
    among = waiting(max_waiting_bytes=4096)
    other, head = Connection("other", among), Connection("flood", among)
    flood = [Connection("flood", among) for _ in range(5)]
    among.grow(other, 1024)
    for each in flood:
        among.grow(each, 1024)
    assert [bool(each.reason) for each in flood] == [True, True, False, False, False]
    assert not (other.reason or head.reason)
    for each in flood[2:]:
        among.admit(each)
    among.grow(other, 3072)
    assert not other.reason


def test_a_flood_of_heads_leaves_the_next_request_its_connection() -> None:
    """All of one address, as whoever is in front of a proxy is."""
    with served(SlowApp(), max_waiting_connections=20, head_timeout_s=30) as port, ExitStack() as stack:
        for _ in range(60):
            connection = stack.enter_context(opened(port))
            connection.sendall(POST + b"Content-Length: 9\r\n\r\n")
        honest = stack.enter_context(opened(port))
        honest.sendall(POST + b"Connection: close\r\nContent-Length: 4\r\n\r\nbody")
        assert all_of(honest).endswith(b"\r\n\r\nbody")


async def tenant_of(caller: HttpCaller) -> str:
    if caller.api_key != "known":
        raise Unauthenticated("no such key")
    return "alice"


KNOWN = "Bearer known"


async def test_heads_with_invented_keys_take_no_place() -> None:
    app = GuardedApp(tenant_of, max_concurrent_requests=1)
    for number in range(50):
        assert await app.status(ends=False, authorization=f"Bearer invented-{number}") == 401
    assert await app.status(1, authorization=KNOWN) == 200


async def test_a_body_on_its_way_takes_no_place() -> None:
    app = GuardedApp(tenant_of, max_concurrent_requests=1)
    slow = [asyncio.create_task(app.status(1, ends=False, authorization=KNOWN)) for _ in range(50)]
    await asyncio.sleep(0)
    assert app.running.count == 0
    assert await app.status(1, authorization=KNOWN) == 200
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.parametrize("client", [("10.0.0.1", 1), None])
async def test_places_without_keys_are_given_by_address(client: Any) -> None:
    app = GuardedApp(max_concurrent_requests=4)
    app.may_answer.clear()
    invented = [f"Bearer invented-{number}" for number in range(8)]
    flood = [asyncio.create_task(app.status(1, client=client, authorization=each)) for each in invented]
    await turns()
    assert any(each.done() for each in flood)
    other = asyncio.create_task(app.status(1, client=("10.0.0.2", 1)))
    await asyncio.sleep(0)
    app.may_answer.set()
    assert await other == 200
    assert 429 in await asyncio.gather(*flood)


async def test_many_of_one_key_begin_few_at_once_and_others_beside_them() -> None:
    names = iter(["alice"] * 3 * MAX_STARTING_REQUESTS + ["bob"])

    async def next_tenant(caller: HttpCaller) -> str:
        return next(names)

    app = GuardedApp(next_tenant)
    app.may_answer.clear()
    many = [asyncio.create_task(app.status(1)) for _ in range(3 * MAX_STARTING_REQUESTS)]
    await turns()
    bob = asyncio.create_task(app.status(1))
    await turns()
    assert len(app.callers) == MAX_STARTING_REQUESTS + 1
    app.callers[0].on_begin()
    app.callers[0].on_begin()
    await turns()
    assert len(app.callers) == MAX_STARTING_REQUESTS + 2, "an answer that has begun lets one more begin"
    app.may_answer.set()
    assert set(await asyncio.gather(*many, bob)) == {200}


async def turns() -> None:
    """Let every task go as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)
