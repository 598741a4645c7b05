"""What services say that their steps take, over real links: measured at load, and as their steps run.

No session has a measured line here unless it says so, and its prefix is one token, so that every step is of decode
rows: a line is known exactly if there was a step for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from draft_service.drafters.model import ModelDrafter
from paceline.costs.service_costs import TargetCosts
from paceline.engine.interface import EngineInfo
from paceline.engine.table.engine import SimulatedEngine, TableEngine
from paceline.models.table_names import TableSpec
from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal
from paceline.protocol.proposal import ROOT, Outcome
from paceline.protocol.session import Failure
from paceline.protocol.target import Prefetch, Round, TargetOpened, Verdict
from target_service.meter import measure_engine
from target_service.session import Session
from tests.services.expected import own_tokens
from tests.services.harness import (
    SPEC,
    Events,
    RecordingEngine,
    chain,
    draft_link,
    draft_open,
    draft_service,
    eventually,
    linked,
    target_link,
    target_open,
    target_service,
    verdict_of,
)

PREFIX = (3,)
OWN = own_tokens(PREFIX, 40)


def sent(at: int, *, session: int = 1, lease: int = 0, drafting: bool = False) -> Round:
    """The target-only round behind so many tokens of the text."""
    text = [*PREFIX, *OWN[:at]]
    return Round(session, len(text) - 1, ROOT, (text[-1],), lease=lease, drafting=drafting)


async def opened(events: Events, *sessions: int) -> None:
    for session in sessions:
        events.link.send(target_open(session, PREFIX))
        await events.of(TargetOpened, session)


async def handled(events: Events) -> None:
    """What was sent is handled, in order: then comes the answer to a round of no session."""
    events.link.send(sent(0, session=99))
    failure = await events.of(Failure, 99)
    assert failure.reason == "UNKNOWN_SESSION"


async def sent_rounds(events: Events) -> TargetCosts:
    for at in range(3):
        await verdict_of(events, sent(at, drafting=True))
    costs: TargetCosts = events.link.costs
    return costs


async def leased_rounds(events: Events) -> TargetCosts:
    events.link.send(sent(0, lease=5, drafting=True))
    for _ in range(6):
        await events.of(Verdict, 1)
    costs: TargetCosts = events.link.costs
    return costs


async def prefetched_rounds(events: Events) -> TargetCosts:
    """The second round is started by the target with what was prefetched for the first one's outcome."""
    first = Round(1, 0, ROOT, PREFIX, chain(OWN[:2]), drafting=True)
    outcome = Outcome(0, 1, OWN[2])
    events.link.send(first)
    events.link.send(Prefetch(1, 0, ((outcome, chain(OWN[3:5], 2)),)))
    verdict = await events.of(Verdict, 1)
    assert verdict.self_started is not None, "the prefetch came in time"
    await events.of(Verdict, 1)
    costs: TargetCosts = events.link.costs
    return costs


WAYS: dict[str, Callable[[Events], Awaitable[TargetCosts]]] = {
    "sent": sent_rounds,
    "leased": leased_rounds,
    "prefetched": prefetched_rounds,
}


async def costs_beside(way: Callable[[Events], Awaitable[TargetCosts]]) -> None:
    """Rounds beside a draft are in their own line, and in that alone; one more without a draft is in the other."""
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        await opened(events, 1, 2)
        costs = await way(events)
        assert costs.beside.is_known
        assert not costs.alone.is_known
        assert (costs.sessions, costs.queue) == (1, 0)
        await verdict_of(events, sent(0, session=2))
        assert events.link.costs.alone.is_known


@pytest.mark.parametrize("way", WAYS)
async def test_rounds_beside_a_draft_have_a_line_of_their_own_whoever_starts_them(way: str) -> None:
    await costs_beside(WAYS[way])


def _forgets(session: Session, value: bool) -> None:
    """The flag is never kept."""


@pytest.mark.parametrize("way", WAYS)
async def test_mutant_a_forgotten_flag_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "drafting", property(lambda session: False, _forgets))
    with pytest.raises(AssertionError):
        await costs_beside(WAYS[way])


@pytest.mark.parametrize("way", ["leased", "prefetched"])
async def test_mutant_a_self_started_round_that_loses_the_flag_is_noticed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_next = Session.start_next

    def losing(session: Session, info: EngineInfo, now: float) -> bool:
        session.drafting = False
        return start_next(session, info, now)

    monkeypatch.setattr(Session, "start_next", losing)
    with pytest.raises(AssertionError):
        await costs_beside(WAYS[way])


async def test_a_round_that_extends_a_lease_says_whether_a_draft_works_from_then_on() -> None:
    engine = RecordingEngine()
    async with target_service(engine) as (_, address), linked(target_link(address)) as events:
        await opened(events, 1)
        engine.go.clear()
        events.link.send(sent(0, lease=2))
        await asyncio.to_thread(engine.entered.wait, 10)
        events.link.send(sent(0, lease=2, drafting=True))
        await handled(events)
        engine.go.set()
        for _ in range(3):
            await events.of(Verdict, 1)
        assert events.link.costs.beside.is_known
        assert not events.link.costs.alone.is_known


async def test_one_session_with_a_draft_makes_a_step_one_beside_it() -> None:
    engine = RecordingEngine()
    async with target_service(engine) as (_, address), linked(target_link(address)) as events:
        await opened(events, 1, 2, 3)
        engine.go.clear()
        events.link.send(sent(0, session=3, drafting=True))
        await asyncio.to_thread(engine.entered.wait, 10)
        events.link.send(sent(0, session=1))
        events.link.send(sent(0, session=2, drafting=True))
        await handled(events)
        assert events.link.costs.queue == 2, "two rounds wait for a step"
        engine.go.set()
        await events.of(Verdict, 1)
        costs = events.link.costs
        assert (costs.sessions, costs.rows, costs.queue) == (2, 2, 0)
        assert not costs.alone.is_known


async def test_lines_are_those_of_the_steps_that_run() -> None:
    engine = SimulatedEngine(TableEngine(SPEC), step_ms=8.0, row_ms=4.0)
    async with target_service(engine) as (_, address), linked(target_link(address)) as events:
        await opened(events, 1)
        await verdict_of(events, sent(0))
        text = [*PREFIX, *OWN[:1]]
        await verdict_of(events, Round(1, len(text) - 1, ROOT, (text[-1],), chain(OWN[1:8])))
        costs = events.link.costs
    assert costs.alone.ms(1) >= 12.0
    assert costs.alone.ms(8) >= 8.0 + 8 * 4 * 0.5, "half of what it took, half of what was expected"


async def test_steps_with_rows_of_a_prefix_are_counted_and_in_no_line() -> None:
    prefix = tuple(range(1, 31))
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, prefix))
        await events.of(TargetOpened, 1)
        costs = events.link.costs
        assert (costs.sessions, costs.rows) == (1, 13), "29 rows are computed in chunks of 16"
        assert costs.alone == costs.beside
        assert not costs.alone.is_known


async def test_a_round_that_waits_for_a_step_is_in_the_service_for_as_long() -> None:
    """What is left of a round's time beyond `service_ms` is the wire's: waiting in the queue is none of that."""
    engine = RecordingEngine()
    async with target_service(engine) as (_, address), linked(target_link(address)) as events:
        await opened(events, 1, 2)
        engine.go.clear()
        events.link.send(sent(0, session=2))
        await asyncio.to_thread(engine.entered.wait, 10)
        events.link.send(sent(0))
        await handled(events)
        handled_at = time.monotonic()
        await asyncio.sleep(0.2)
        waited_ms = (time.monotonic() - handled_at) * 1e3
        engine.go.set()
        verdict = await events.of(Verdict, 1)
    assert verdict.timings.queue_ms >= waited_ms
    assert verdict.timings.service_ms >= verdict.timings.queue_ms


def test_a_loaded_target_is_measured_and_holds_nothing_afterwards() -> None:
    engine = SimulatedEngine(TableEngine(SPEC), step_ms=4.0, row_ms=1.0)
    line = measure_engine(engine)
    assert [rows for rows, _ in line.points] == [1, 2, 4, 8, 16, 32, 64]
    for rows, ms in line.points:
        assert ms >= 4.0 + rows
    assert engine.kv_rows == 0


def test_a_target_of_few_rows_is_measured_as_far_as_its_steps_go() -> None:
    line = measure_engine(RecordingEngine(replace(SPEC, max_kv_rows=12)))
    assert [rows for rows, _ in line.points] == [1, 2, 4, 8]


def test_a_loaded_drafter_is_measured_and_holds_nothing_afterwards() -> None:
    engine = SimulatedEngine(TableEngine(SPEC), step_ms=4.0, row_ms=1.0)
    drafter = ModelDrafter(engine, 16)
    drafter.measure()
    assert [rows for rows, _ in drafter.line.points] == [1, 2, 4, 8, 16, 32]
    for rows, ms in drafter.line.points:
        assert ms >= 4.0 + rows, "each step had as many rows as it was asked for"
    assert engine.kv_rows == 0


async def test_a_drafts_steps_are_said_with_its_proposals() -> None:
    engine = SimulatedEngine(TableEngine(SPEC), step_ms=3.0)
    async with draft_service(engine) as (servicer, address), linked(draft_link(address)) as events:
        assert not events.link.costs.line.is_known
        events.link.send(draft_open(1, PREFIX, DraftBudget(max_tokens=4)))
        drafted = await events.of(DraftedProposal, 1)
        costs = events.link.costs
        assert costs.line.ms(1) >= 3.0
        assert (costs.sessions, costs.rows) == (1, 1)
        token = drafted.proposal.token_ids[0]
        events.link.send(Commit(1, Outcome(0, ROOT, token), (token,), 1, DraftBudget(max_tokens=2)))
        await events.of(DraftedProposal, 1)
        assert events.link.costs.queue == 0
        await eventually(lambda: servicer.scheduler.costs.line.is_known, "its status has it, too")


@pytest.mark.parametrize("kind", ["target", "draft"])
async def test_a_coordinator_that_comes_later_knows_the_lines_at_once(kind: str) -> None:
    engine: Any = SimulatedEngine(TableEngine(SPEC), step_ms=3.0)
    if kind == "target":
        async with target_service(engine) as (_, address):
            async with linked(target_link(address)) as events:
                await opened(events, 1)
                await verdict_of(events, sent(0))
                said = events.link.costs.alone
            async with linked(target_link(address)) as events:
                assert events.link.costs.alone.ms(1) == pytest.approx(said.ms(1), rel=1e-6)
        return
    async with draft_service(engine) as (_, address):
        async with linked(draft_link(address)) as events:
            events.link.send(draft_open(1, PREFIX, DraftBudget(max_tokens=4)))
            await events.of(DraftedProposal, 1)
        async with linked(draft_link(address)) as events:
            assert events.link.costs.line.ms(1) >= 3.0


@pytest.mark.parametrize("spec", [replace(SPEC, max_length=2), replace(SPEC, max_kv_rows=66), replace(SPEC, vocab=2)])
def test_a_drafter_without_room_is_measured_as_far_as_it_goes(spec: TableSpec) -> None:
    drafter = ModelDrafter(RecordingEngine(spec), 16)
    drafter.measure()
    assert [rows for rows, _ in drafter.line.points] == ([1, 2] if spec.vocab == 2 else [])
