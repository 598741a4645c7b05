"""A draining service refuses new sessions on the links that it has, as something to try again; the others go on."""

from __future__ import annotations

from paceline.protocol.codec import error_of
from paceline.protocol.draft import DraftOpen
from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import TargetOpen
from paceline.rpc.sessions import DRAINING, DRAINING_RETRY_MS
from tests.services.harness import Events, draft_open, eventually, first_round, target_open, verdict_of
from tests.services.test_draft import K4, OWN, PREFIX, commit_of


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
