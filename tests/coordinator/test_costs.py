"""Whose costs a request's sessions know, and what its rounds say of a draft."""

from __future__ import annotations

import pytest

from coordinator.sessions.draft import DraftSession
from paceline.costs.cost_line import CostLine
from paceline.costs.service_costs import DraftCosts
from paceline.protocol.draft import DraftBudget
from paceline.protocol.target import Round
from tests.coordinator.requests import PROMPT, RecordingLink, TargetRequest, draft_pool, task_of

LINE = CostLine(((1, 10.0), (8, 20.0)))


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


@pytest.mark.parametrize("drafting", [False, True])
async def test_a_round_says_whether_a_draft_works_meanwhile(drafting: bool) -> None:
    request = TargetRequest()
    waiting = await request.pending(drafting=drafting)
    (round_,) = request.link.take_only(Round)
    assert round_.drafting is drafting
    waiting.cancel()
