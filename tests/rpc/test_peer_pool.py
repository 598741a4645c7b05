"""Placement on several peers: where the prefix is, unless that peer is overloaded; draining; one model; refusals."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from coordinator import pools as membership_module
from coordinator.pools import Membership
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from paceline.drafting.draft_pool import DraftPeer
from paceline.protocol.errors import Overloaded, PacelineError, PeerUnavailable, VocabularyMismatch
from paceline.protocol.handshake import Fingerprint, ServiceStatus
from paceline.rpc import peer_pool as pool_module
from paceline.rpc.endpoints import Endpoint, EndpointSource
from paceline.rpc.peer_pool import ALWAYS_EVEN, BLOCK_TOKENS, PrefixMemory, choose
from paceline.rpc.retries import Retries
from tests.coordinator.requests import RecordingLink, draft_pool, target_peer
from tests.rpc.harness import Client, silent_listener, until

PREFIX = tuple(range(3 * BLOCK_TOKENS))


class FakeLink(RecordingLink):
    """Stands for a link to a target that starts, closes and says its load."""

    def __init__(self, address: str, *, model: str = "m", is_up: bool = True) -> None:
        super().__init__(fingerprint=Fingerprint(model, numeric="n"))
        self.address, self.is_up, self.closed = address, is_up, False
        self.sessions = self.queue = 0

    async def start(self) -> None:
        self.is_up = True
        cast(Any, self).on_change()

    async def close(self) -> None:
        self.closed, self.is_up = True, False

    async def status(self, timeout_s: float) -> ServiceStatus:
        return ServiceStatus("1", Fingerprint(), self.sessions, 0, 0, self.queue, 0, 0, 0)

    def why_down(self) -> PacelineError:
        if self.is_refused:
            return VocabularyMismatch(f"{self.address} has another vocabulary")
        return PeerUnavailable(f"no link to {self.address}")


def pool_of(*links: FakeLink) -> TargetPool:
    return TargetPool(map(target_peer, links), round_timeout_s=10, wait_s=10)


def address_of(peer: TargetPeer | DraftPeer | None) -> str | None:
    return None if peer is None else peer.link.address


def test_a_tenants_prefix_is_remembered_in_whole_blocks_of_which_the_oldest_are_forgotten() -> None:
    memory = PrefixMemory(max_blocks=4)
    memory.remember("a", PREFIX, "one")
    memory.remember("b", PREFIX[: BLOCK_TOKENS + 1], "one")
    assert memory.longest(("a", "b", "c"), PREFIX, "one") == {"a": 3 * BLOCK_TOKENS, "b": BLOCK_TOKENS, "c": 0}
    assert memory.longest(("a",), PREFIX, "another") == {"a": 0}
    other = (7, *PREFIX[1:])
    assert memory.longest(("a", "b"), other, "one") == {"a": 0, "b": 0}, "a block counts behind the same tokens only"
    memory.remember("c", other[:BLOCK_TOKENS])
    memory.remember("c", (9,) * BLOCK_TOKENS)
    assert memory.longest(("c",), other) == {"c": BLOCK_TOKENS}
    assert memory.longest(("a",), PREFIX, "one") == {"a": 0}


@pytest.mark.parametrize(
    ("loads", "cached", "expected"),
    [
        ({"a": 3, "b": 1}, {"a": 0, "b": 0}, "b"),
        ({"a": 1 + ALWAYS_EVEN, "b": 1}, {"a": 64, "b": 0}, "a"),
        ({"a": 2 + ALWAYS_EVEN, "b": 1}, {"a": 64, "b": 0}, "b"),
        ({"a": 20, "b": 10}, {"a": 64, "b": 0}, "a"),
        ({"a": 21, "b": 10}, {"a": 64, "b": 0}, "b"),
        ({"a": 2, "b": 1}, {"a": 64, "b": 128}, "b"),
    ],
)
def test_the_cache_decides_unless_loads_are_too_uneven(
    loads: dict[str, float], cached: dict[str, int], expected: str
) -> None:
    assert choose(loads, cached) == expected


async def test_sessions_follow_their_prefix_and_others_the_load() -> None:
    pool = pool_of(FakeLink("a"), FakeLink("b"))
    first = pool.place(PREFIX)
    assert first is not None
    first.attach(mock.Mock())
    assert pool.place((*PREFIX, 1, 2, 3)) is first
    other = pool.place((5, 6, 7))
    assert other is not None and other is not first, "nothing is known of it, so it goes to the idle one"


async def test_what_other_coordinators_have_there_counts() -> None:
    pool = pool_of(FakeLink("a"), FakeLink("b"))
    pool.peers[0].foreign_sessions = 3
    assert address_of(pool.place((1, 2))) == "b"


async def test_another_models_target_is_left_out_until_the_first_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    one = FakeLink("a")
    pool = pool_of(one, FakeLink("b", model="other"))
    assert {address_of(pool.place((n,))) for n in range(8)} == {"a"}
    assert caplog.text.count("target of another model, left out: address=b model=other expected=m") == 1
    one.is_up = False
    assert pool.place((1,)) is None, "a target that is down does not make another model this one"
    pool.remove(pool.peers[0])
    assert address_of(pool.place((1,))) == "b"


async def test_a_refusal_sends_the_next_session_elsewhere_and_is_forgotten() -> None:
    pool = pool_of(FakeLink("a"), FakeLink("b"))
    first, second = pool.peers
    pool.note_refusal(first, Overloaded("full", retry_after_ms=40))
    assert {address_of(pool.place((n,))) for n in range(8)} == {"b"}
    pool.note_refusal(second, Overloaded("full", retry_after_ms=60_000))
    assert not pool.is_willing()
    await pool.wait_willing(5.0, lambda _: True)
    assert address_of(pool.place((1,))) == "a"


async def test_a_lone_peer_that_refused_is_asked_again() -> None:
    pool = pool_of(FakeLink("a"))
    pool.note_refusal(pool.peers[0], Overloaded("full", retry_after_ms=60_000))
    assert address_of(pool.place((1,))) == "a"
    with pytest.raises(Overloaded, match="full"):
        await pool.wait_willing(0.01, lambda _: True)


FULL = Overloaded("full", retry_after_ms=40)


async def test_a_session_that_all_refused_comes_no_sooner_than_was_said_and_on_the_budget() -> None:
    pool = pool_of(FakeLink("a"))
    pool.note_refusal(pool.peers[0], FULL)
    began = time.monotonic()
    await pool.wait_to_retry(FULL, Retries(pool.budget), 5.0, lambda _: True)
    assert time.monotonic() - began >= 0.04
    while pool.budget.take():
        pass
    pool.note_refusal(pool.peers[0], FULL)
    with pytest.raises(Overloaded, match="full"):
        await pool.wait_to_retry(FULL, Retries(pool.budget), 0.1, lambda _: True)


async def test_a_session_goes_at_once_to_a_peer_that_has_not_refused() -> None:
    pool = pool_of(FakeLink("a"), FakeLink("b"))
    while pool.budget.take():
        pass
    pool.note_refusal(pool.peers[0], FULL)
    await pool.wait_to_retry(FULL, Retries(pool.budget), 0.0, lambda _: True)


async def test_who_is_missing_and_why_is_said() -> None:
    refusing, down = FakeLink("a"), FakeLink("b", is_up=False)
    pool = pool_of(refusing, down)
    pool.note_refusal(pool.peers[0], Overloaded("a is full", retry_after_ms=60_000))
    with pytest.raises(PeerUnavailable, match="none of 2 targets takes the session: a is full; no link to b"):
        await pool.wait_willing(0.01, lambda _: True)
    empty = pool_of()
    empty.sources = "dns:///nowhere:1"
    with pytest.raises(PeerUnavailable, match=r"no target is known \(dns:///nowhere:1\)"):
        await empty.wait_up(0.01)


async def test_peers_that_do_not_fit_are_told_at_once() -> None:
    link = FakeLink("a", is_up=False)
    link.is_refused = True
    with pytest.raises(VocabularyMismatch):
        await pool_of(link).wait_up(60.0)


async def test_waiting_ends_when_a_link_comes_up() -> None:
    link = FakeLink("a", is_up=False)
    pool = pool_of(link)
    waiting = asyncio.create_task(pool.wait_up(60.0))
    await asyncio.sleep(0)
    await link.start()
    await asyncio.wait_for(waiting, 5.0)


async def test_a_draft_pool_mixes_drafters() -> None:
    links = FakeLink("a"), FakeLink("b", model="other")
    links[1].welcome = replace(links[1].welcome, drafters=("eagle",))
    pool = draft_pool(*links)

    def has_eagle(peer: DraftPeer) -> bool:
        return peer.link.welcome is not None and "eagle" in peer.link.welcome.drafters

    assert address_of(pool.place((1, 2), has_eagle)) == "b"
    assert {address_of(pool.place((n,))) for n in range(8)} == {"a"}, "the first of two idle ones"


class Members:
    """A membership over endpoints that the test names, and the links it made."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] = ()
        self.links: dict[str, FakeLink] = {}
        self.pool = pool_of()
        source = EndpointSource("test", self._resolve, 0.001)
        self.membership = Membership(self.pool, [source], self._make)

    async def _resolve(self) -> list[Endpoint]:
        return [Endpoint(address) for address in self.addresses]

    def _make(self, endpoint: Endpoint) -> TargetPeer:
        self.links[endpoint.address] = link = FakeLink(endpoint.address, is_up=False)
        return target_peer(link)

    async def become(self, *addresses: str) -> None:
        self.addresses = addresses
        await until(lambda: {peer.link.address for peer in self.pool.peers} == set(addresses))


@pytest.fixture
async def members(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Members]:
    """A membership that looks at its endpoints and at the load all the time."""
    monkeypatch.setattr(membership_module, "LOAD_PERIOD_S", 0.001)
    running = Members()
    running.membership.start()
    yield running
    await running.membership.close()


async def test_a_vanished_peer_drains_and_is_closed_when_its_last_session_ends(members: Members) -> None:
    await members.become("a", "b", "c")
    await members.pool.wait_up(5.0)
    (first,) = [peer for peer in members.pool.peers if peer.link.address == "a"]
    session_id = first.attach(mock.Mock())
    await members.become("b")
    assert address_of(members.pool.place((1,))) == "b"
    await until(lambda: members.links["c"].closed)
    assert not members.links["a"].closed, "its session goes on"
    first.detach(session_id)
    await until(lambda: members.links["a"].closed)
    await members.membership.close()
    assert members.links["b"].closed


async def test_a_peer_that_comes_back_while_it_drains_keeps_its_link(members: Members) -> None:
    await members.become("a")
    (first,) = members.pool.peers
    session_id = first.attach(mock.Mock())
    await members.become()
    await members.become("a")
    assert members.pool.peers == (first,)
    first.detach(session_id)
    await asyncio.sleep(0)
    assert not members.links["a"].closed


async def test_a_session_that_waits_is_counted_once_and_our_own_not_among_the_others(members: Members) -> None:
    await members.become("a", "b")
    first, second = members.pool.peers
    for _ in range(2):
        first.attach(mock.Mock())
    members.links["a"].sessions, members.links["a"].queue = 5, 4  # of the five, ours too, four wait
    members.links["b"].sessions = 9  # asked beside or behind it
    await until(lambda: second.foreign_sessions == 9)
    assert (first.foreign_sessions, first.load) == (3, 5)


async def test_a_question_whose_link_ends_meanwhile_is_not_the_last(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    async with silent_listener() as port, Client(port) as hung:
        await until(lambda: hung.link._channel)

        async def ask(link: FakeLink, timeout_s: float) -> ServiceStatus:
            if link.address == "b":
                return await answer(link, timeout_s)
            asked.set()
            return await hung.link.status(60)

        answer = FakeLink.status
        monkeypatch.setattr(FakeLink, "status", ask)
        await members.become("a", "b")
        await asyncio.wait_for(asked.wait(), 5)
        await hung.link.close()
        members.links["b"].sessions = 3
        second = members.pool.peers[1]
        await until(lambda: second.foreign_sessions == 3, 5)


@pytest.mark.parametrize("looks", range(6))
async def test_a_pause_that_ends_between_two_looks_is_seen(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes a while, so a refusal ends before, between or behind any two of them."""
    clock = itertools.count()
    monkeypatch.setattr(pool_module, "clock", SimpleNamespace(now=lambda: 0.7e-3 * next(clock)))
    pool = pool_of(FakeLink("a"))
    pool.note_refusal(pool.peers[0], Overloaded("full", retry_after_ms=looks))
    async with asyncio.timeout(10):
        await pool.wait_willing(1e6, lambda peer: True)
