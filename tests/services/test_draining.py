"""A draining service refuses new sessions on the links that it has, as something to try again; the others go on."""

from __future__ import annotations

from typing import Any

from paceline.protocol.codec import error_of
from paceline.protocol.draft import DraftBudget, DraftedProposal, DraftOpened
from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import TargetOpened
from paceline.rpc.sessions import DRAINING, DRAINING_RETRY_MS
from tests.services.expected import own_tokens
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
    verdict_of,
)
from tests.services.test_draft import commit_of

PREFIX = (1, 2, 3)
K4 = DraftBudget(max_tokens=4)


async def refused(events: Events, command: Any) -> None:
    events.link.send(command)
    failure = await events.of(Failure, command.session_id)
    error = error_of(failure)
    assert isinstance(error, PeerUnavailable)
    assert failure.session_closed
    assert failure.retry_safe
    assert (error.retry_after_ms, error.metadata) == (DRAINING_RETRY_MS, {DRAINING: "true"})


async def test_a_target_that_drains_verifies_on() -> None:
    async with target_service(RecordingEngine()) as (servicer, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        await events.of(TargetOpened, 1)
        servicer.scheduler.draining = True
        await refused(events, target_open(2, PREFIX))
        verdict = await verdict_of(events, first_round(1, PREFIX))
        assert verdict.token_ids[0] == own_tokens(PREFIX, 1)[0]
        events.link.send(Close(1))
        await eventually(lambda: servicer.scheduler.sessions == 0, "the refused session is not there")


async def test_a_draft_that_drains_proposes_on() -> None:
    async with draft_service(RecordingEngine()) as (servicer, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K4))
        await events.of(DraftOpened, 1)
        first = await events.of(DraftedProposal, 1)
        servicer.scheduler.draining = True
        await refused(events, draft_open(2, PREFIX, K4))
        own = own_tokens(PREFIX, 9)
        assert first.proposal.token_ids == tuple(own[:4])
        events.link.send(commit_of(1, list(PREFIX), 3, own[:5]))
        assert (await events.of(DraftedProposal, 1)).proposal.token_ids == tuple(own[5:9])
