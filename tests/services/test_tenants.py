"""What one peer, or one tenant, can learn of another and take from it: reused tokens, and room for sessions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.protocol.draft import DraftBudget, DraftOpen, DraftOpened
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import TargetOpen, TargetOpened, Verdict
from tests.services.harness import (
    Events,
    RecordingEngine,
    draft_link,
    draft_open,
    draft_service,
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
