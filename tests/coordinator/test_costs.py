"""Whose costs a request's sessions know, and what its rounds say of a draft."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from coordinator.sessions.draft import DraftSession
from coordinator.sessions.draft_pool import DraftPeer, DraftPool
from paceline.costs.cost_line import CostLine
from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import ROOT
from paceline.protocol.target import Round
from tests.coordinator.test_target_session import PROMPT, RecordingLink, Request, turns

LINE = CostLine(((1, 10.0), (8, 20.0)))


class CostlyLink(RecordingLink):
    """Stands for a link that is up, to a service that says its costs."""

    def __init__(self, costs: TargetCosts | DraftCosts, drafters: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.costs = costs
        self.welcome = replace(self.welcome, drafters=drafters)


async def test_a_drafts_costs_are_known_before_a_session_is_placed() -> None:
    """Whether to draft at all is planned before a session is opened."""
    link = CostlyLink(DraftCosts(LINE, rows=5), drafters=("model",))
    pool = DraftPool([DraftPeer(cast(Any, link))], timeout_s=1, vocab_size=64)
    session = DraftSession(pool, Request(RecordingLink()).task, "model")
    assert session.peer is pool.peers[0]
    assert session.peer.costs == DraftCosts(LINE, rows=5)
    session.open(PROMPT, DraftBudget(), "")
    link.costs = DraftCosts(LINE, rows=6)
    assert session.peer.costs.rows == 6, "the latest"
    assert DraftSession(pool, Request(RecordingLink()).task, "elsewhere").peer is None
    assert DraftSession(None, Request(RecordingLink()).task, "").peer is None


@pytest.mark.parametrize("drafting", [False, True])
async def test_a_round_says_whether_a_draft_works_meanwhile(drafting: bool) -> None:
    request = Request(RecordingLink())

    async def dispatched(round_: Round) -> None:
        await asyncio.sleep(0)

    sending = request.session.verify(request.ids, ROOT, None, 0, "", dispatched, drafting=drafting)
    waiting = asyncio.create_task(sending)
    await turns()
    (round_,) = [command for command in request.link.take() if isinstance(command, Round)]
    assert round_.drafting is drafting
    waiting.cancel()
