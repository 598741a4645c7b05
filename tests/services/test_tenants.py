"""What one peer, or one tenant, can learn of another and take from it: reused tokens, and room for sessions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.models.table_names import TableSpec
from paceline.protocol.draft import DraftBudget
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import TargetOpened
from paceline.rpc.sessions import RETRY_AFTER_MS
from target_service.batching import Turns
from tests.services.harness import (
    Events,
    RecordingEngine,
    draft_open,
    eventually,
    first_round,
    linked_draft,
    linked_target,
    target_open,
    verdict_of,
)

PROMPT = tuple(i % 32 for i in range(70))
LIMITED = TableSpec(vocab=32, seed=3, max_length=256, max_kv_rows=700)
"""Room for four sessions of 100 + 64 rows."""


async def reused_tokens(events: Events, session_id: int, tenant: str) -> int:
    """Open a session, run its first round, and say how much of its prompt came from others."""
    opened = await events.answer(target_open(session_id, PROMPT, tenant=tenant), TargetOpened)
    await verdict_of(events, first_round(session_id, PROMPT))
    return opened.reused_tokens


@pytest.mark.parametrize(("share_prefixes", "others"), [(False, 0), (True, len(PROMPT) - 1)])
async def test_a_tenant_is_told_of_its_own_prefixes_alone_unless_shared(share_prefixes: bool, others: int) -> None:
    async with linked_target(RecordingEngine(), share_prefixes=share_prefixes) as ann, ann.another() as bob:
        assert await reused_tokens(ann, 1, "ann") == 0
        assert await reused_tokens(bob, 1, "bob") == others
        assert await reused_tokens(bob, 2, "") == others
        assert await reused_tokens(ann, 2, "ann") == len(PROMPT) - 1


KINDS: dict[str, Any] = {
    "target": (linked_target, target_open),
    "draft": (linked_draft, partial(draft_open, budget=DraftBudget())),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_link_leaves_room_for_the_others(kind: str) -> None:
    linked, opens = KINDS[kind]
    first, second, third, fourth = (opens(session, PROMPT) for session in range(1, 5))
    async with linked(RecordingEngine(), max_sessions_per_link=2) as greedy, greedy.another() as other:
        await greedy.open(first, second)
        text = "max_sessions_per_link = 2 sessions of this link are open"
        assert (await greedy.expect_failure(third, "OVERLOADED", text, closed=True)).retry_after_ms
        await other.open(first)
        greedy.send(Close(1))
        await greedy.open(fourth)


@pytest.mark.parametrize(
    ("share", "states", "served"),
    [(0.5, 0, 2), (1.0, 0, 3), (0.5, 50, 1), (0.1, 0, 1)],
    ids=["two of three", "all", "each has states, too", "one that alone exceeds the share"],
)
async def test_a_link_holds_its_share_of_the_rows_and_its_further_sessions_wait(
    share: float, states: int, served: int
) -> None:
    engine = RecordingEngine(LIMITED)
    engine.info = replace(engine.info, session_rows=states)
    async with linked_target(engine, max_link_share=share) as greedy, greedy.another() as other:
        greedy.send(*(target_open(session, (session,), max_length=100) for session in (1, 2, 3)))
        for session in range(1, 1 + served):
            await greedy.of(TargetOpened, session)
        await other.open(target_open(1, (9,), max_length=100))
        assert (greedy.servicer.scheduler.queue_length, greedy.has(TargetOpened)) == (3 - served, False)
        greedy.send(Close(1))
        if served < 3:
            await greedy.of(TargetOpened, 1 + served)


async def order_of_a_flood(flood: int, room: int) -> list[str]:
    """Whose sessions a target with little room lets in, where another tenant's two come behind a flood."""
    order: list[str] = []
    tenants = dict.fromkeys(range(1, flood + 1), "flood") | {flood + 1: "calm", flood + 2: "calm"}
    async with linked_target(RecordingEngine(), max_num_seqs=room) as events:
        events.send(*(target_open(session, (session,), tenant=tenant) for session, tenant in tenants.items()))
        while len(order) < len(tenants):
            await eventually(lambda: events.has(TargetOpened), "the next is opened")
            for opened in events.take_all(TargetOpened):
                order.append(tenants[opened.session_id])
                events.send(Close(opened.session_id))
    return order


FLOOD = 12


async def test_a_flood_of_one_tenant_lets_another_one_s_sessions_in_between() -> None:
    order = await order_of_a_flood(FLOOD, room=2)
    assert order.count("calm") == 2
    last_calm = max(place for place, tenant in enumerate(order) if tenant == "calm")
    assert last_calm <= 5, f"they wait for what is in already, not for the whole flood: {order}"


async def test_the_order_of_arrival_would_fail_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "order", lambda self, waiting, chosen: iter([*waiting]))
    with pytest.raises(AssertionError, match="not for the whole flood"):
        await test_a_flood_of_one_tenant_lets_another_one_s_sessions_in_between()


async def test_a_flood_leaves_places_in_the_queue() -> None:
    """One session runs, and of ten places in the queue eight are a single tenant's at most."""
    flood = [target_open(session, PROMPT, tenant="flood") for session in range(1, 12)]
    async with linked_target(RecordingEngine(), max_num_seqs=1, max_queue=10) as events:
        await events.open(flood[0])
        events.send(*flood[1:9])
        for opening in flood[9:]:
            text = "max_queue = 10: the key has 8 of them"
            failure = await events.expect_failure(opening, "OVERLOADED", text, closed=True)
            assert failure.retry_after_ms == RETRY_AFTER_MS
        events.send(target_open(12, PROMPT, tenant="calm"), Close(1))
        await events.of(TargetOpened, 12)
        assert not events.has(TargetOpened), "it comes before all that had a place when it came"


async def test_a_flood_leaves_sessions_of_a_draft_service_to_others() -> None:
    flood = [draft_open(session, PROMPT, DraftBudget(), tenant="flood") for session in range(1, 11)]
    async with linked_draft(RecordingEngine(), max_num_seqs=10) as events:
        events.send(*flood[:8])
        failure = await events.answer(flood[8], Failure)
        assert "engine.max_num_seqs = 10: the key has 8 of them" in failure.message
        await events.open(draft_open(11, PROMPT, DraftBudget(), tenant="calm"))
        events.send(*map(Close, range(1, 4)))
        await events.open(flood[9])


async def test_prompts_of_tenants_are_computed_in_turns() -> None:
    """A chunk has room for one of them at a time: the calm tenant's is second, not thirteenth."""
    engine = RecordingEngine()
    async with linked_target(engine, prefill_chunk=16) as events:
        await engine.hold(events, target_open(1, (1,) * 33, tenant="flood"))
        events.send(*(target_open(session, (session,) * 33, tenant="flood") for session in range(2, FLOOD + 1)))
        await events.handled(target_open(FLOOD + 1, (FLOOD + 1,) * 33, tenant="calm"))
        engine.go.set()
        for session in range(1, FLOOD + 2):
            await events.of(TargetOpened, session)
    served = [item.token_ids[0] for plan in engine.plans for item in plan.items]
    assert served.index(FLOOD + 1) <= 3, served
