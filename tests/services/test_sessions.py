"""What the schedulers of both services share: the end of sessions, and draining, in which the open ones go on."""

from __future__ import annotations

import asyncio

from paceline.protocol.codec import error_of
from paceline.protocol.draft import DraftOpen
from paceline.protocol.errors import InvalidInput, PeerUnavailable
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import TargetOpen
from paceline.rpc.sessions import DRAINING, DRAINING_RETRY_MS
from tests.services.harness import (
    Events,
    RecordingEngine,
    draft_open,
    eventually,
    first_round,
    target_open,
    verdict_of,
)
from tests.services.test_draft import K4, OWN, PREFIX, commit_of


async def test_a_session_ends_once_its_link_is_told_and_a_service_without_sessions_is_idle(
    engine: RecordingEngine, target: Events
) -> None:
    scheduler = target.servicer.scheduler
    await target.open(target_open(7, PREFIX), target_open(8, PREFIX))
    (link,) = target.servicer._links
    closed, failed = link._sessions[7], link._sessions[8]
    waiting = asyncio.ensure_future(scheduler.idle())
    for _ in range(2):
        scheduler.close(closed)
    await target.handled()
    assert scheduler.sessions == 1
    assert not waiting.done()
    for session in (failed, failed, closed):
        scheduler._fail(session, InvalidInput.of("rows", 9, "at most 8"))
    await asyncio.wait_for(waiting, 1)
    failure = await target.of(Failure, 8)
    assert (failure.reason, failure.session_closed) == ("INVALID_INPUT", True)
    await target.handled()
    assert not target.has(Failure), "it is told once, and nothing of the one that the other side closed"
    assert [*link._sessions] == [7], "the failed one is forgotten"
    await eventually(lambda: engine.kv_rows == 0, "the rows are free")


async def is_refused(events: Events, opening: TargetOpen | DraftOpen) -> None:
    failure = await events.answer(opening, Failure)
    error = error_of(failure)
    assert isinstance(error, PeerUnavailable)
    assert failure.session_closed
    assert failure.retry_safe
    assert (error.retry_after_ms, error.metadata) == (DRAINING_RETRY_MS, {DRAINING: "true"})


async def test_a_target_that_drains_verifies_on(target: Events) -> None:
    await target.open(target_open(1, PREFIX))
    target.servicer.scheduler.draining = True
    await is_refused(target, target_open(2, PREFIX))
    assert (await verdict_of(target, first_round(1, PREFIX))).token_ids[0] == OWN[0]
    target.send(Close(1))
    await eventually(lambda: target.servicer.scheduler.sessions == 0, "the refused session is not there")


async def test_a_draft_that_drains_proposes_on(draft: Events) -> None:
    assert (await draft.proposal(draft_open(1, PREFIX, K4))).token_ids == tuple(OWN[:4])
    draft.servicer.scheduler.draining = True
    await is_refused(draft, draft_open(2, PREFIX, K4))
    assert (await draft.proposal(commit_of(1, PREFIX, 3, OWN[:5]))).token_ids == tuple(OWN[5:9])
