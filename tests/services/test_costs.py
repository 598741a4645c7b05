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
from paceline.costs.cost_line import CostLine
from paceline.costs.service_costs import UNKNOWN_LINE
from paceline.engine.interface import Engine, EngineInfo
from paceline.engine.table.engine import SimulatedEngine, TableEngine
from paceline.protocol.draft import Commit, DraftBudget, Verifying
from paceline.protocol.proposal import ROOT, Outcome
from paceline.protocol.target import Prefetch, Round, Verdict
from target_service.measuring import measure_engine
from target_service.session import Session
from tests.services.expected import own_tokens
from tests.services.harness import (
    SPEC,
    Events,
    RecordingEngine,
    chain,
    draft_open,
    eventually,
    linked_draft,
    linked_target,
    target_open,
    verdict_of,
)

PREFIX = (3,)
OWN = own_tokens(PREFIX, 40)


def sent(at: int, *, session: int = 1, lease: int = 0, drafting: bool = False) -> Round:
    """The target-only round behind so many tokens of the text."""
    text = [*PREFIX, *OWN[:at]]
    return Round(session, len(text) - 1, ROOT, (text[-1],), lease=lease, drafting=drafting)


async def opened(events: Events, *sessions: int) -> None:
    await events.open(*(target_open(session, PREFIX) for session in sessions))


async def send_rounds(target: Events) -> None:
    for at in range(3):
        await verdict_of(target, sent(at, drafting=True))


async def send_leased_rounds(target: Events) -> None:
    target.send(sent(0, lease=5, drafting=True))
    for _ in range(6):
        await target.of(Verdict, 1)


async def send_prefetched_rounds(target: Events) -> None:
    """The second round is started by the target with what was prefetched for the first one's outcome."""
    first = Round(1, 0, ROOT, PREFIX, chain(OWN[:2]), drafting=True)
    target.send(first, Prefetch(1, 0, ((Outcome(0, 1, OWN[2]), chain(OWN[3:5], 2)),)))
    assert (await target.of(Verdict, 1)).self_started is not None, "the prefetch came in time"
    await target.of(Verdict, 1)


WAYS: dict[str, Callable[[Events], Awaitable[None]]] = {
    "sent": send_rounds,
    "leased": send_leased_rounds,
    "prefetched": send_prefetched_rounds,
}


@pytest.mark.parametrize("way", WAYS)
async def test_rounds_beside_a_draft_have_a_line_of_their_own_whoever_starts_them(way: str, target: Events) -> None:
    """They are in that line alone; one more without a draft is in the other."""
    await opened(target, 1, 2)
    await WAYS[way](target)
    costs = target.link.costs
    assert costs.beside.is_known
    assert not costs.alone.is_known
    assert (costs.sessions, costs.queue) == (1, 0)
    await verdict_of(target, sent(0, session=2))
    assert target.link.costs.alone.is_known


def _forgets(session: Session, value: bool) -> None:
    """The flag is never kept."""


def _loses(session: Session, info: EngineInfo, now: float) -> bool:
    session.drafting = False
    return _start_next(session, info, now)


_start_next = Session.start_next
FORGETFUL = ("drafting", property(lambda session: False, _forgets))
LOSING = ("start_next", _loses)


@pytest.mark.parametrize(
    ("mutant", "way"),
    [*((FORGETFUL, way) for way in WAYS), (LOSING, "leased"), (LOSING, "prefetched")],
    ids=[*(f"a forgotten flag, {way}" for way in WAYS), "lost by a lease", "lost by a prefetched round"],
)
async def test_mutants_are_noticed(
    mutant: tuple[str, Any], way: str, target: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, *mutant)
    with pytest.raises(AssertionError):
        await test_rounds_beside_a_draft_have_a_line_of_their_own_whoever_starts_them(way, target)


async def test_a_round_that_extends_a_lease_says_whether_a_draft_works_from_then_on(
    engine: RecordingEngine, target: Events
) -> None:
    await opened(target, 1)
    await engine.hold(target, sent(0, lease=2))
    await target.handled(sent(0, lease=2, drafting=True))
    engine.go.set()
    for _ in range(3):
        await target.of(Verdict, 1)
    assert target.link.costs.beside.is_known
    assert not target.link.costs.alone.is_known


async def test_one_session_with_a_draft_makes_a_step_one_beside_it(engine: RecordingEngine, target: Events) -> None:
    await opened(target, 1, 2, 3)
    await engine.hold(target, sent(0, session=3, drafting=True))
    await target.handled(sent(0, session=1), sent(0, session=2, drafting=True))
    assert target.link.costs.queue == 2, "two rounds wait for a step"
    engine.go.set()
    await target.of(Verdict, 1)
    costs = target.link.costs
    assert (costs.sessions, costs.rows, costs.queue) == (2, 2, 0)
    assert not costs.alone.is_known


async def test_lines_are_those_of_the_steps_that_run_and_who_comes_later_knows_them_at_once() -> None:
    engine = SimulatedEngine(TableEngine(SPEC), step_ms=8.0, row_ms=4.0)
    async with linked_target(engine) as events:
        await opened(events, 1)
        await verdict_of(events, sent(0))
        async with events.another() as later:
            assert later.link.costs.alone.ms(1) == pytest.approx(events.link.costs.alone.ms(1), rel=1e-6)
        text = [*PREFIX, *OWN[:1]]
        await verdict_of(events, Round(1, len(text) - 1, ROOT, (text[-1],), chain(OWN[1:8])))
        costs = events.link.costs
    assert costs.alone.ms(1) >= 12.0
    assert costs.alone.ms(8) >= 8.0 + 8 * 4 * 0.5, "half of what it took, half of what was expected"


async def test_steps_with_rows_of_a_prefix_are_counted_and_in_no_line(target: Events) -> None:
    prefix = tuple(range(1, 31))
    await target.open(target_open(1, prefix))
    costs = target.link.costs
    assert (costs.sessions, costs.rows) == (1, 13), "29 rows are computed in chunks of 16"
    assert costs.alone == costs.beside
    assert not costs.alone.is_known


async def test_a_round_that_waits_for_a_step_is_in_the_service_for_as_long(
    engine: RecordingEngine, target: Events
) -> None:
    """What is left of a round's time beyond `service_ms` is the wire's: waiting in the queue is none of that."""
    await opened(target, 1, 2)
    await engine.hold(target, sent(0, session=2))
    await target.handled(sent(0))
    handled_at = time.monotonic()
    await asyncio.sleep(0.05)
    waited_ms = (time.monotonic() - handled_at) * 1e3
    engine.go.set()
    verdict = await target.of(Verdict, 1)
    assert verdict.timings.queue_ms >= waited_ms
    assert verdict.timings.service_ms >= verdict.timings.queue_ms


def measured_drafter(engine: Engine) -> CostLine:
    drafter = ModelDrafter(engine, 16)
    drafter.measure()
    return drafter.line


@pytest.mark.parametrize(("measure", "most"), [(measure_engine, 64), (measured_drafter, 32)])
def test_what_is_loaded_is_measured_and_holds_nothing(measure: Callable[[Engine], CostLine], most: int) -> None:
    engine = SimulatedEngine(TableEngine(SPEC), step_ms=1.0, row_ms=0.2)
    line = measure(engine)
    assert [rows for rows, _ in line.points] == [rows for rows in (1, 2, 4, 8, 16, 32, 64) if rows <= most]
    for rows, ms in line.points:
        assert ms >= 1.0 + 0.2 * rows, "each step had as many rows as it was asked for"
    assert engine.kv_rows == 0


@pytest.mark.parametrize(
    ("measure", "limit", "measured"),
    [
        (measure_engine, {"max_kv_rows": 12}, [1, 2, 4, 8]),
        (measured_drafter, {"max_length": 2}, []),
        (measured_drafter, {"max_kv_rows": 66}, []),
        (measured_drafter, {"vocab": 2}, [1, 2]),
    ],
)
def test_without_room_it_is_measured_as_far_as_its_steps_go(
    measure: Callable[[Engine], CostLine], limit: dict[str, int], measured: list[int]
) -> None:
    line = measure(RecordingEngine(replace(SPEC, **limit)))
    assert [rows for rows, _ in line.points] == measured


async def test_a_drafts_steps_are_said_with_its_proposals() -> None:
    engine = SimulatedEngine(TableEngine(SPEC), step_ms=3.0)
    async with linked_draft(engine) as events:
        assert not events.link.costs.line.is_known
        token = (await events.proposal(draft_open(1, PREFIX, DraftBudget(max_tokens=4)))).token_ids[0]
        costs = events.link.costs
        assert costs.line.ms(1) >= 3.0
        assert (costs.sessions, costs.rows) == (1, 1)
        await events.proposal(Commit(1, Outcome(0, ROOT, token), (token,), 1, DraftBudget(max_tokens=2)))
        assert events.link.costs.queue == 0
        await eventually(lambda: events.servicer.scheduler.costs.line.is_known, "its status has it, too")
        async with events.another() as later:
            assert later.link.costs.line.ms(1) >= 3.0, "who comes later knows it at once"


async def test_a_drafts_steps_for_outcomes_are_said_apart_from_those_that_somebody_waits_for() -> None:
    class Slowing(SimulatedEngine):
        def slow_to(self, ms: float) -> None:
            self._step_ms = ms

    engine = Slowing(TableEngine(SPEC), step_ms=3.0)
    async with linked_draft(engine) as events:
        budget = DraftBudget(max_tokens=2)
        offer = await events.proposal(draft_open(1, PREFIX, budget))
        costs = events.servicer.scheduler.costs
        waited, aside = costs.line, costs.line_of("", beside=True)
        assert waited == aside != UNKNOWN_LINE, "no step was beside the target's yet"
        engine.slow_to(300.0)
        outcomes = DraftBudget(max_tokens=2, fan_out=2)
        events.send(Verifying(1, len(PREFIX) - 1, offer.proposal_id, 1, budget=outcomes))
        await eventually(lambda: events.servicer.scheduler.costs.beside != (), "they are said")
        costs = events.servicer.scheduler.costs
        assert costs.line == waited
        assert costs.line_of("model", beside=True).ms(1) > 1.5 * waited.ms(1)
