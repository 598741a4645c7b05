"""What one peer, or one tenant, can learn of another and take from it: reused tokens, and room for sessions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.models.table_names import TableSpec
from paceline.protocol.draft import DraftBudget, DraftOpen, DraftOpened
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import TargetOpen, TargetOpened, Verdict
from paceline.rpc.sessions import RETRY_AFTER_MS
from target_service.turns import Turns
from tests.services.harness import (
    Events,
    RecordingEngine,
    draft_link,
    draft_open,
    draft_service,
    eventually,
    first_round,
    linked,
    target_link,
    target_open,
    target_service,
)

PROMPT = tuple(i % 32 for i in range(70))


def open_of(session_id: int, tenant: str) -> TargetOpen:
    opened = target_open(session_id, PROMPT)
    return replace(opened, spec=replace(opened.spec, tenant=tenant))


async def reused(events: Events, session_id: int, tenant: str) -> int:
    """Open a session, run its first round, and say how much of its prompt came from others."""
    events.link.send(open_of(session_id, tenant))
    told = (await events.of(TargetOpened, session_id)).reused_tokens
    events.link.send(first_round(session_id, PROMPT), urgent=True)
    await events.of(Verdict, session_id)
    return told


@pytest.mark.parametrize(("share_prefixes", "told"), [(False, 0), (True, len(PROMPT) - 1)])
async def test_a_tenant_is_told_of_its_own_prefixes_alone_unless_they_are_shared(
    share_prefixes: bool, told: int
) -> None:
    async with (
        target_service(RecordingEngine(), share_prefixes=share_prefixes) as (_, address),
        linked(target_link(address)) as ann,
        linked(target_link(address)) as bob,
    ):
        assert await reused(ann, 1, "ann") == 0
        assert await reused(bob, 1, "bob") == told
        assert await reused(bob, 2, "") == told
        assert await reused(ann, 2, "ann") == len(PROMPT) - 1


def draft_open_of(session_id: int) -> DraftOpen:
    return draft_open(session_id, PROMPT, DraftBudget())


KINDS: dict[str, Any] = {
    "target": (target_service, target_link, partial(open_of, tenant=""), TargetOpened),
    "draft": (draft_service, draft_link, draft_open_of, DraftOpened),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_link_leaves_room_for_the_others(kind: str) -> None:
    service, link, open_, opened = KINDS[kind]
    async with (
        service(RecordingEngine(), max_sessions_per_link=2) as (_, address),
        linked(link(address)) as greedy,
        linked(link(address)) as other,
    ):
        for session in (1, 2, 3):
            greedy.link.send(open_(session))
        refused = await greedy.of(Failure, 3)
        assert (refused.reason, refused.session_closed) == ("OVERLOADED", True)
        assert "max_sessions_per_link = 2 sessions of this link are open" in refused.message
        assert refused.retry_after_ms
        other.link.send(open_(1))
        await other.of(opened, 1)
        await greedy.of(opened, 1)
        greedy.link.send(Close(1))
        greedy.link.send(open_(4))
        await greedy.of(opened, 4)


@pytest.mark.parametrize(("share", "waits"), [(0.5, True), (1.0, False)])
async def test_a_link_holds_its_share_of_the_rows_and_its_further_sessions_wait(share: float, waits: bool) -> None:
    """Each session takes 100 + 64 of 700 rows."""
    engine = RecordingEngine(TableSpec(vocab=32, seed=3, max_length=256, max_kv_rows=700))
    async with (
        target_service(engine, max_link_share=share) as (servicer, address),
        linked(target_link(address)) as greedy,
        linked(target_link(address)) as other,
    ):
        for session in (1, 2, 3):
            greedy.link.send(target_open(session, (session,), max_length=100))
        for session in (1, 2):
            await greedy.of(TargetOpened, session)
        other.link.send(target_open(1, (9,), max_length=100))
        await other.of(TargetOpened, 1)
        assert (servicer.scheduler.queue_length, greedy.has(TargetOpened)) == ((1, False) if waits else (0, True))
        greedy.link.send(Close(1))
        await greedy.of(TargetOpened, 3)


async def test_a_session_that_alone_exceeds_the_share_is_served_alone() -> None:
    engine = RecordingEngine(TableSpec(vocab=32, seed=3, max_length=256, max_kv_rows=700))
    async with target_service(engine, max_link_share=0.1) as (_, address), linked(target_link(address)) as events:
        for session in (1, 2):
            events.link.send(target_open(session, (session,), max_length=100))
        await events.of(TargetOpened, 1)
        assert not events.has(TargetOpened)
        events.link.send(Close(1))
        await events.of(TargetOpened, 2)


async def admitted_next(events: Events, sessions: list[int]) -> int:
    """Which of these sessions is opened first."""
    await eventually(lambda: events.has(TargetOpened), "one of them is opened")
    return next(session for session in sessions if events.has(TargetOpened, session))


async def order_of_a_flood(flood: int, room: int) -> list[str]:
    """Whose sessions a target with little room lets in, where another tenant's two come behind a flood."""
    order: list[str] = []
    tenants = dict.fromkeys(range(1, flood + 1), "flood") | {flood + 1: "calm", flood + 2: "calm"}
    async with (
        target_service(RecordingEngine(), max_num_seqs=room) as (_, address),
        linked(target_link(address)) as events,
    ):
        for session, tenant in tenants.items():
            opened = target_open(session, (session,))
            events.link.send(replace(opened, spec=replace(opened.spec, tenant=tenant)))
        while tenants:
            session = await admitted_next(events, [*tenants])
            await events.of(TargetOpened, session)
            order.append(tenants.pop(session))
            events.link.send(Close(session))
    return order


FLOOD = 12


@pytest.mark.parametrize("room", [1, 2])
async def test_a_flood_of_one_tenant_lets_another_one_s_sessions_in_between(room: int) -> None:
    order = await order_of_a_flood(FLOOD, room)
    assert order.count("calm") == 2
    last_calm = max(place for place, tenant in enumerate(order) if tenant == "calm")
    assert last_calm <= 5, f"they wait for what is in already, not for the whole flood: {order}"


async def test_the_order_of_arrival_would_fail_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "order", lambda self, waiting, chosen: iter([*waiting]))
    with pytest.raises(AssertionError, match="not for the whole flood"):
        await test_a_flood_of_one_tenant_lets_another_one_s_sessions_in_between(2)


async def test_a_flood_leaves_places_in_the_queue() -> None:
    """One session runs, and of ten places in the queue eight are a single tenant's at most."""
    async with (
        target_service(RecordingEngine(), max_num_seqs=1, max_queue=10) as (_, address),
        linked(target_link(address)) as events,
    ):
        events.link.send(open_of(1, "flood"))
        await events.of(TargetOpened, 1)
        for session in range(2, 12):
            events.link.send(open_of(session, "flood"))
        refused = [await events.of(Failure, session) for session in (10, 11)]
        assert {(each.reason, each.session_closed, each.retry_after_ms) for each in refused} == {
            ("OVERLOADED", True, RETRY_AFTER_MS)
        }
        assert "max_queue = 10: the key has 8 of them" in refused[0].message
        events.link.send(open_of(12, "calm"))
        events.link.send(Close(1))
        await events.of(TargetOpened, 12)
        assert not events.has(TargetOpened), "it comes before all that had a place when it came"


async def test_a_flood_leaves_sessions_of_a_draft_service_to_others() -> None:
    def open_for(session: int, tenant: str) -> DraftOpen:
        opened = draft_open_of(session)
        return replace(opened, spec=replace(opened.spec, tenant=tenant))

    async with (
        draft_service(RecordingEngine(), max_num_seqs=10) as (_, address),
        linked(draft_link(address)) as events,
    ):
        for session in range(1, 10):
            events.link.send(open_for(session, "flood"))
        assert "engine.max_num_seqs = 10: the key has 8 of them" in (await events.of(Failure, 9)).message
        events.link.send(open_for(10, "calm"))
        await events.of(DraftOpened, 10)
        for session in range(1, 4):
            events.link.send(Close(session))
        events.link.send(open_for(11, "flood"))
        await events.of(DraftOpened, 11)


async def test_prompts_of_tenants_are_computed_in_turns() -> None:
    """A chunk has room for one of them at a time: the calm tenant's is second, not thirteenth."""
    engine = RecordingEngine()
    engine.go.clear()
    async with target_service(engine, prefill_chunk=16) as (_, address), linked(target_link(address)) as events:
        prompts = {session: (session,) * 33 for session in range(1, FLOOD + 2)}
        for session, prompt in prompts.items():
            opened = target_open(session, prompt)
            tenant = "calm" if session == FLOOD + 1 else "flood"
            events.link.send(replace(opened, spec=replace(opened.spec, tenant=tenant)))
        await asyncio.to_thread(engine.entered.wait)
        engine.go.set()
        for session in prompts:
            await events.of(TargetOpened, session)
    served = [item.token_ids[0] for plan in engine.plans for item in plan.items]
    assert served.index(FLOOD + 1) <= 3, served
