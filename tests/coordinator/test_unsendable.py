"""What is too large for a link's frames: nothing stays counted, and a draft that can't be told costs speed only."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.sessions.draft import DraftSession
from coordinator.sessions.draft_pool import DraftPool
from coordinator.sessions.round_draft import PendingCommit
from paceline.protocol.draft import Commit, DraftBudget, DraftOpen
from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import ROOT, Outcome
from paceline.protocol.target import TargetOpen
from tests.coordinator.requests import PROMPT, RecordingLink, TargetRequest, draft_pool, task_of

BEHIND = PendingCommit(Outcome(2, ROOT, 4), (4,), (*PROMPT, 4), DraftBudget(4), "", is_awaited=False)


class NarrowLink(RecordingLink):
    """A link whose frames have no room for one kind of command."""

    def __init__(self, too_large: type) -> None:
        super().__init__()
        self._too_large = too_large

    def send(self, command: Any, urgent: bool = False) -> None:
        if isinstance(command, self._too_large):
            raise InvalidInput.of(f"bytes of {self._too_large.__name__}", 2_000_000, "at most 1048576")
        super().send(command, urgent)


async def test_a_target_session_that_cannot_be_sent_is_not_counted_on_its_peer() -> None:
    request = TargetRequest(NarrowLink(TargetOpen))
    with pytest.raises(InvalidInput, match="bytes of TargetOpen"):
        await request.round()
    request.session.close()
    assert request.pool.peers[0].sessions == 0


def draft_over(link: NarrowLink) -> tuple[DraftPool, DraftSession]:
    pool = draft_pool(link)
    return pool, DraftSession(pool, task_of(), "")


async def test_a_draft_session_that_cannot_be_sent_is_done_without_for_good() -> None:
    pool, session = draft_over(NarrowLink(DraftOpen))
    session.open(PROMPT, DraftBudget(4), "")
    assert (session.is_open, session.is_ready, pool.peers[0].sessions) == (False, False, 0)
    session.commit(BEHIND)
    assert not session.is_open


async def test_a_draft_that_cannot_be_told_is_done_without() -> None:
    pool, session = draft_over(NarrowLink(Commit))
    session.open(PROMPT, DraftBudget(4), "")
    assert session.is_open
    session.settle(BEHIND.outcome)
    session.commit(BEHIND)
    assert (session.is_open, pool.peers[0].sessions) == (False, 0)
