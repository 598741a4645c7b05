"""The target service when things go wrong: bad input, full queues, failing steps, cut links."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.interface import NO_PREFIX, Prefix
from paceline.models.table_names import TableSpec
from paceline.protocol.features import FeatureNeed, FeatureRequest
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT, Acceptance, Proposal, SparseDistribution
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import LIFE_SIGN_MS, AtWork, Round, TargetOpened, Verdict
from target_service import progress
from tests.services.expected import next_token
from tests.services.harness import (
    Events,
    RecordingEngine,
    chain,
    eventually,
    first_round,
    linked_target,
    target_open,
    verdict_of,
)

PREFIX = (1, 2, 3)
FORK = Proposal(1, (4, 5), (1.0, 1.0), (ROOT, ROOT))


@pytest.mark.parametrize(
    ("prefix", "text"),
    [((1, 32), "token_ids = 32: must be in [0, 32)"), ((1,) * 257, "session length = 257: must be at most 256")],
)
async def test_an_open_that_cannot_be_served(prefix: tuple[int, ...], text: str, target: Events) -> None:
    await target.expect_failure(target_open(1, prefix), "INVALID_INPUT", text, closed=True)
    await still_serves(target)


def supported(entries: tuple[int, ...], q: float) -> Proposal:
    """Of one token, drawn from a support."""
    return Proposal(1, (3,), (q,), supports=(SparseDistribution(entries, (q,) * len(entries)),))


@pytest.mark.parametrize(
    ("acceptance", "round_", "text"),
    [
        (Acceptance.COUPLED, first_round(1, PREFIX, chain([40])), "proposal token_ids = 40: must be in [0, 32)"),
        (Acceptance.COUPLED, Round(1, 2, ROOT, (3, 99)), "committed token_ids = 99"),
        (Acceptance.COUPLED, Round(1, 2, ROOT, (3,) * 255), "sequence length = 257: must be at most 256"),
        (Acceptance.COUPLED, first_round(1, PREFIX, supported((3,), 1.0)), "proposal supports = 1: must be 0 under"),
        (Acceptance.REJECTION, first_round(1, PREFIX, chain([4, 5])), "proposal supports = 0: must be 2"),
        (Acceptance.BLOCK, first_round(1, PREFIX, FORK), "a chain under block acceptance"),
        (Acceptance.REJECTION, first_round(1, PREFIX, supported((3, 64), 0.5)), "support token_ids = 64"),
    ],
)
async def test_a_refused_round_leaves_its_session_open(
    acceptance: Acceptance, round_: Round, text: str, target: Events
) -> None:
    target.send(target_open(1, PREFIX, acceptance=acceptance))
    await target.expect_failure(round_, "INVALID_INPUT", text, closed=False)
    assert len((await verdict_of(target, first_round(1, PREFIX))).token_ids) == 1


async def test_a_second_open_of_an_id_and_an_unknown_id_are_refused(target: Events) -> None:
    """A mismatch, which the session outlives: no fault of a request's, so the coordinator opens another session."""
    target.send(target_open(1, PREFIX))
    await target.expect_failure(target_open(1, (4, 5)), "PREFIX_MISMATCH", closed=False)
    assert (await target.answer(first_round(9, PREFIX), Failure)).reason == "UNKNOWN_SESSION"
    assert (await verdict_of(target, first_round(1, PREFIX))).token_ids == (next_token(PREFIX),)


async def test_a_failing_step_fails_its_own_sessions_only(engine: RecordingEngine, target: Events) -> None:
    await target.open(*(target_open(i, PREFIX) for i in (1, 2, 3)))
    engine.poison = 31
    target.send(first_round(1, PREFIX, chain([31])), first_round(2, PREFIX), urgent=True)
    failures = [await target.of(Failure, i) for i in (1, 2)]
    assert [(failure.reason, failure.session_closed) for failure in failures] == [("INTERNAL", True)] * 2
    assert (await verdict_of(target, first_round(3, PREFIX))).token_ids == (next_token(PREFIX),)
    assert target.servicer.status().sessions == 1
    target.send(Close(3))
    await eventually(lambda: engine.kv_rows == 0, "all rows are free")
    await still_serves(target)


async def test_a_session_that_the_kv_budget_cannot_hold_is_refused_at_its_open() -> None:
    engine = RecordingEngine(TableSpec(vocab=32, seed=3, max_length=64, max_kv_rows=20))
    async with linked_target(engine) as events:
        assert events.link.welcome is not None
        assert events.link.welcome.max_length == 20
        too_long = target_open(1, PREFIX, max_length=21)
        await events.expect_failure(too_long, "INVALID_INPUT", "length = 21: must be at most 20", closed=True)
        events.send(target_open(2, PREFIX, max_length=20))
        fits = chain([7] * (20 - len(PREFIX)))
        assert len((await verdict_of(events, first_round(2, PREFIX, fits))).token_ids) == len(fits) + 1


class FailsOnce(RecordingEngine):
    """Has reserved the rows of the first session when it finds no memory for its features."""

    failed = False

    def keep_features(self, session: int, need: FeatureNeed) -> None:
        super().keep_features(session, need)
        if not self.failed:
            self.failed = True
            raise MemoryError("no memory for its rows")


async def test_a_session_whose_open_failed_holds_no_rows() -> None:
    """Each session wants the whole budget."""
    engine = FailsOnce(TableSpec(vocab=32, seed=3, max_length=64, max_kv_rows=100))
    async with linked_target(engine) as events:
        opening = target_open(1, PREFIX, features=FeatureRequest(FeatureNeed((1,))))
        await events.expect_failure(opening, "INTERNAL", closed=True)
        assert engine.kv_rows == 0
        await still_serves(events)
        assert events.servicer.scheduler.waiting == 0


@pytest.mark.parametrize("limited", ["kv", "sessions"])
async def test_sessions_wait_for_room_and_then_are_overloaded(limited: str) -> None:
    one = 64 + MAX_PROPOSAL_NODES
    spec = TableSpec(vocab=32, seed=3, max_length=64, max_kv_rows=one if limited == "kv" else 100 * one)
    engine = RecordingEngine(spec)
    async with linked_target(engine, max_num_seqs=1 if limited == "sessions" else 64, max_queue=1) as events:
        await events.open(target_open(1, PREFIX))
        events.send(target_open(2, PREFIX), first_round(2, PREFIX))
        failure = await events.expect_failure(target_open(3, PREFIX), "OVERLOADED", "max_queue = 1", closed=True)
        assert failure.retry_after_ms
        assert events.servicer.status().sessions == 2
        events.send(Close(1))
        assert await events.of(TargetOpened, 2)
        assert (await events.of(Verdict, 2)).token_ids
        assert engine.kv_rows == one


class HeldOpens(RecordingEngine):
    """Notes the rows that sessions want, and can be held while it looks whether they are there."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        self.tried_rows: list[int] = []
        self.may_open = threading.Event()
        self.may_open.set()

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:
        self.tried_rows.append(max_rows)
        assert self.may_open.wait(10)
        return super().open(session, max_rows, prefix)


@pytest.mark.parametrize("leaves", ["once it has found no room", "while it is tried"])
async def test_whoever_found_no_room_and_leaves_holds_nobody_up(leaves: str) -> None:
    """Of 500 rows 264 are held. 320 are too many beside them, 164 are not."""
    engine = HeldOpens(TableSpec(vocab=32, seed=3, max_length=256, max_kv_rows=500))
    async with linked_target(engine) as holder, holder.another() as events:
        await holder.open(target_open(1, PREFIX, max_length=200))
        if leaves == "while it is tried":
            engine.may_open.clear()
        events.send(target_open(2, PREFIX, max_length=256))
        await eventually(lambda: engine.tried_rows == [264, 320], "it is tried")
        if leaves == "once it has found no room":
            assert await signed(events) == {2}
        events.send(Close(2))
        await eventually(lambda: holder.servicer.status().sessions == 1, "it has left")
        engine.may_open.set()
        await events.open(target_open(3, PREFIX, max_length=100))
        assert engine.kv_rows == 264 + 164
        assert holder.servicer.scheduler.waiting == 0


async def test_signs_of_life_name_the_sessions_that_wait_and_no_others() -> None:
    engine = RecordingEngine()
    async with linked_target(engine, max_num_seqs=2) as events:
        await events.open(target_open(3, PREFIX))
        frames = events.servicer.status().frames_sent
        await hold_a_round(engine, events)
        events.send(target_open(2, PREFIX))
        assert await signed(events) == {1, 2}, "one in a step, one without room; 3 has been sent nothing"
        engine.go.set()
        await events.of(Verdict, 1)
        assert events.servicer.status().frames_sent - frames <= 2, "a frame that carries nothing is not counted"
        events.send(Close(3))
        await events.of(TargetOpened, 2)
        assert await signed(events) == set()


async def signed(events: Events) -> set[int]:
    """The sessions that the next whole sign of life names, behind all that is under way."""
    await a_sign_of_life(events)
    events.take_all(AtWork)
    await a_sign_of_life(events)
    return {sign.session_id for sign in events.take_all(AtWork)}


def test_work_that_nobody_begins_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "clock", SimpleNamespace(now=lambda: now))
    clock = progress.EngineProgress(timeout_s=5.0)
    now += 60
    assert clock.moves(waits=False), "idle for long"
    now += 4
    assert clock.moves(waits=True), "it came a moment ago"
    now += 2
    assert not clock.moves(waits=True)
    with clock.busy():
        assert clock.moves(waits=True)
        now += 6
        assert not clock.moves(waits=False), "it hangs"
        clock.note_work()
        assert clock.moves(waits=True)
    now += 60
    assert clock.moves(waits=False)


async def a_sign_of_life(events: Events) -> None:
    """Wait for a frame behind a while without one."""
    await eventually(lambda: events.link.silent_s > LIFE_SIGN_MS / 2e3, "a while without a frame")
    await eventually(lambda: events.link.silent_s < LIFE_SIGN_MS / 4e3, "a frame")


async def test_a_step_that_hangs_is_no_sign_of_life() -> None:
    engine = RecordingEngine()
    async with linked_target(engine, step_timeout_s=0.001) as events:
        await hold_a_round(engine, events)
        await eventually(lambda: events.link.silent_s > 4 * LIFE_SIGN_MS / 1e3, "the target falls silent")
        engine.go.set()
        await events.of(Verdict, 1)
        await a_sign_of_life(events)


async def hold_a_round(engine: RecordingEngine, events: Events) -> None:
    """Open session 1; returns once its first round is in a step that doesn't end."""
    await events.open(target_open(1, PREFIX))
    await engine.hold(events, first_round(1, PREFIX))


async def still_serves(events: Any) -> None:
    events.send(target_open(77, PREFIX))
    verdict = await verdict_of(events, first_round(77, PREFIX))
    assert verdict.token_ids == (next_token(PREFIX),)
