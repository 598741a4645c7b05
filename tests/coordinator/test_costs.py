"""Whose costs a request's sessions know, and what its rounds say of a draft."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from coordinator.sessions.draft import DraftSession
from coordinator.sessions.draft_pool import DraftPeer, DraftPool
from coordinator.sessions.target_pool import TargetPeer
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


async def test_a_targets_costs_are_known_before_a_session_is_placed_and_are_its_own_afterwards() -> None:
    links = [CostlyLink(TargetCosts(LINE.scaled(n), rows=n)) for n in (1, 2)]
    request = Request(links[0])
    request.pool.add(TargetPeer(cast(Any, links[1])))
    assert request.session.costs.rows == 1
    request.pool.remove(request.peer)
    assert request.session.costs.rows == 2, "the one that takes new sessions"
    waiting = asyncio.create_task(request.round())
    await turns()
    request.pool.add(request.peer)
    assert request.session.costs == TargetCosts(LINE.scaled(2), rows=2), "it is placed there"
    links[1].costs = TargetCosts(LINE.scaled(3), rows=3)
    assert request.session.costs == links[1].costs, "the latest"
    waiting.cancel()


async def test_without_a_target_nothing_is_known() -> None:
    link = CostlyLink(TargetCosts(LINE))
    link.is_up = False
    assert Request(link).session.costs == TargetCosts()


@pytest.mark.parametrize(
    ("drafter", "line"),
    [("", LINE), ("model", LINE), ("model:other", CostLine()), ("elsewhere", None)],
    ids=["any", "default", "another", "unknown"],
)
async def test_a_line_is_of_the_default_drafter_alone(drafter: str, line: CostLine | None) -> None:
    link = CostlyLink(DraftCosts(LINE, rows=5), drafters=("model", "model:other"))
    pool = DraftPool([DraftPeer(cast(Any, link))], timeout_s=1, vocab_size=64)
    task = Request(RecordingLink()).task
    session = DraftSession(pool, task, drafter)
    expected = DraftCosts() if line is None else DraftCosts(line, rows=5)
    assert session.costs == expected
    session.open(PROMPT, DraftBudget(), "")
    assert session.costs == expected, "placed or not"


async def test_a_request_without_a_draft_service_knows_no_draft_costs() -> None:
    assert DraftSession(None, Request(RecordingLink()).task, "").costs == DraftCosts()


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
