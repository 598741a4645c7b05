"""A request's session on a draft service: whose costs it knows, and what is too large to be told."""

from __future__ import annotations

from paceline.costs.cost_line import CostLine
from paceline.costs.service_costs import DraftCosts
from paceline.drafting.round_draft import PendingCommit
from paceline.drafting.session import DraftSession
from paceline.protocol.draft import Commit, DraftBudget, DraftOpen
from paceline.protocol.proposal import ROOT, Outcome
from tests.coordinator.requests import PROMPT, NarrowLink, RecordingLink, draft_pool, task_of

LINE = CostLine(((1, 10.0), (8, 20.0)))
BEHIND = PendingCommit(Outcome(2, ROOT, 4), (4,), (*PROMPT, 4), DraftBudget(4), "", is_awaited=False)


async def test_a_drafts_costs_are_known_before_a_session_is_placed() -> None:
    """Whether to draft at all is planned before a session is opened."""
    link = RecordingLink(DraftCosts(LINE, rows=5), drafters=("model",))
    pool = draft_pool(link)
    session = DraftSession(pool, task_of(), "model")
    assert session.peer is pool.peers[0]
    assert session.peer.costs == DraftCosts(LINE, rows=5)
    session.open(PROMPT, DraftBudget(), "")
    link.costs = DraftCosts(LINE, rows=6)
    assert session.peer.costs.rows == 6, "the latest"
    assert DraftSession(pool, task_of(), "elsewhere").peer is None
    assert DraftSession(None, task_of(), "").peer is None


async def test_a_draft_that_cannot_be_told_is_done_without() -> None:
    for too_large in (DraftOpen, Commit):
        pool = draft_pool(NarrowLink(too_large))
        session = DraftSession(pool, task_of(), "")
        session.open(PROMPT, DraftBudget(4), "")
        is_open = too_large is Commit
        assert (session.is_open, session.is_ready, pool.peers[0].sessions) == (is_open, is_open, is_open)
        session.settle(BEHIND.outcome)
        session.commit(BEHIND)
        assert (session.is_open, pool.peers[0].sessions) == (False, 0)
