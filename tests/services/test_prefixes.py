"""Prefixes over real links: computed once, in fair turns, beside running rounds."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from paceline.engine.interface import Logits, StepPlan
from paceline.models.table_names import TableSpec
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT
from paceline.protocol.sampling import NoiseKey
from paceline.protocol.session import Close
from paceline.protocol.target import Round, TargetOpened, Verdict
from target_service.batching import Batcher, BatchingWindow
from target_service.scheduler import TargetScheduler
from target_service.session import Session
from tests.services.expected import next_token, own_tokens
from tests.services.harness import (
    Events,
    RecordingEngine,
    chain,
    eventually,
    first_round,
    linked,
    linked_target,
    target_link,
    target_open,
    target_service,
    verdict_of,
)

SYSTEM = tuple(random.Random(3).choices(range(32), k=200))
LONG = TableSpec(vocab=32, seed=3, max_length=8192)


def computed(engine: RecordingEngine) -> Counter[int]:
    """How often rows of each position were computed for prefixes, that is without logits."""
    rows: Counter[int] = Counter()
    for plan in engine.plans:
        for item in plan.items:
            without = min(item.logit_rows, default=len(item.token_ids))
            rows.update(range(item.base_length, item.base_length + without))
    return rows


@pytest.mark.parametrize("samples", [True, False], ids=["samples of one prompt", "one system prompt"])
async def test_fifty_sessions_at_once_compute_their_common_prefix_once(samples: bool) -> None:
    engine = RecordingEngine()
    prefixes = {i: (*SYSTEM, *((7,) if samples else (i % 32, i // 32, 5))) for i in range(1, 51)}
    async with linked_target(engine, prefill_chunk=64) as events:
        for i, prefix in prefixes.items():
            events.send(target_open(i, prefix, noise=NoiseKey(i)), first_round(i, prefix))
        opened = [(await events.of(TargetOpened, i)).reused_tokens for i in prefixes]
        for i, prefix in prefixes.items():
            assert (await events.of(Verdict, i)).token_ids == (next_token(prefix, NoiseKey(i)),)
        full = 200 if samples else 192
        assert sorted(opened) == [0] + [full] * 49
        assert {computed(engine)[position] for position in range(full)} == {1}
        events.send(*map(Close, prefixes))
        await eventually(lambda: engine.kv_rows == 0, "all rows are free")


async def test_a_leader_that_ends_leaves_the_prefix_to_the_next(engine: RecordingEngine, target: Events) -> None:
    status = target.servicer.status
    async with target.another() as cut:
        await engine.hold(cut, target_open(1, (*SYSTEM, 1)))
        target.send(*(target_open(i, (*SYSTEM, i)) for i in (1, 2, 3)))
        await eventually(lambda: status().sessions == 4, "all have arrived")
    await eventually(lambda: status().sessions == 3, "the leader has ended")
    engine.go.set()
    for i in (1, 2, 3):
        await target.of(TargetOpened, i)
        verdict = await verdict_of(target, first_round(i, (*SYSTEM, i)))
        assert verdict.token_ids == (next_token((*SYSTEM, i)),)
    assert max(computed(engine)[position] for position in range(100, 200)) == 1


async def use(events: Events, i: int, source: random.Random, *, stays: bool) -> None:
    """Open a session and send a round; cancel it before its verdict, or close it after, unless it stays."""
    prefix = (*SYSTEM[: source.choice([5, 40, 100, 200])], i % 32)
    events.send(target_open(i, prefix, max_length=source.choice([0, 210])), first_round(i, prefix))
    if source.random() < 0.7:
        assert (await events.of(Verdict, i)).token_ids == (next_token(prefix),)
        if stays:
            return
    events.send(Close(i))


async def test_nothing_is_left_after_500_sessions_with_cancels_and_kills() -> None:
    source = random.Random(9)
    room = 30 * (256 + MAX_PROPOSAL_NODES)
    engine = RecordingEngine(TableSpec(vocab=32, seed=3, max_length=256, max_kv_rows=room))
    async with target_service(engine, max_queue=500, max_num_seqs=40) as (servicer, address):
        for wave in range(10):
            killed = wave % 3 == 2
            async with linked(target_link(address)) as events:
                users = [asyncio.create_task(use(events, i, source, stays=killed)) for i in range(1, 51)]
                await asyncio.wait(users, return_when=asyncio.FIRST_COMPLETED if killed else asyncio.ALL_COMPLETED)
            for user in users:
                user.cancel()
            outcomes = await asyncio.gather(*users, return_exceptions=True)
            assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
            assert engine.kv_rows + engine.cached_rows <= room
        await eventually(lambda: engine.kv_rows == 0, "all rows are free")
        assert servicer.status().sessions == 0
        assert servicer.scheduler.queue_length == 0
        async with linked(target_link(address)) as events:
            events.send(target_open(1, SYSTEM))
            assert (await verdict_of(events, first_round(1, SYSTEM))).token_ids == (next_token(SYSTEM),)


async def four_streams_beside_a_prompt(engine: RecordingEngine, tokens: int) -> None:
    """Send rounds of four sessions, one behind the other, while a prompt of so many tokens is computed."""
    texts: dict[int, list[int]] = {i: [i, 2, 3] for i in range(1, 5)}
    async with linked_target(engine, prefill_chunk=128) as events:
        await events.open(*(target_open(i, text) for i, text in texts.items()))
        engine.plans.clear()
        events.send(target_open(9, random.Random(4).choices(range(32), k=tokens)))
        opened = asyncio.ensure_future(events.of(TargetOpened, 9))

        async def stream(i: int, text: list[int]) -> None:
            while not opened.done():
                text += (await verdict_of(events, Round(i, len(text) - 1, ROOT, (text[-1],)))).token_ids

        await asyncio.gather(*(stream(i, text) for i, text in texts.items()), opened)
    for i, text in texts.items():
        assert text[3:] == own_tokens((i, 2, 3), len(text) - 3)


async def test_a_prompt_of_4000_tokens_delays_four_streams_by_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RecordingEngine(LONG)
    arrived: list[tuple[int, int]] = []
    submit = TargetScheduler.submit

    def noting(self: TargetScheduler, session: Session, round_: Round) -> None:
        arrived.append((session.key, len(engine.plans)))
        submit(self, session, round_)

    monkeypatch.setattr(TargetScheduler, "submit", noting)
    await four_streams_beside_a_prompt(engine, 4000)
    chunks = [sum(len(item.token_ids) for item in plan.items if not item.logit_rows) for plan in engine.plans]
    assert max(chunks) == 128
    assert sum(chunks) == 3999
    for session, step in arrived:
        # What was under way, or just handed to the thread, ends; the next step has the round.
        assert session in {item.session for plan in engine.plans[step : step + 2] for item in plan.items}
    assert len(arrived) >= 4 * 2


class SlowEngine(RecordingEngine):
    """Steps that take much longer than a round trip."""

    def step(self, plan: StepPlan) -> Sequence[Logits]:
        time.sleep(0.02)
        return super().step(plan)


async def test_a_chunk_waits_for_streams_that_are_about_to_be_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the prompt alone would cost each of them a whole chunk, the first one as any other."""
    engine = SlowEngine(LONG)
    windows: list[tuple[int, int]] = []
    decide = Batcher.window

    def noting(self: Batcher, ready: int, now: float, prefix_rows: int = 0) -> BatchingWindow:
        windows.append((prefix_rows, sum(plan.rows >= 128 for plan in engine.plans)))
        return decide(self, ready, now, prefix_rows)

    monkeypatch.setattr(Batcher, "window", noting)
    await four_streams_beside_a_prompt(engine, 20 * 128)
    beside = [len(plan.items) - 1 for plan in engine.plans if not all(item.logit_rows for item in plan.items)]
    assert len(beside) == 20
    # Started at once, every second chunk would run alone; a busy machine may cost some.
    assert sum(beside) >= 0.75 * 4 * len(beside), beside
    assert (128, 0) in windows, "before the first chunk"


async def test_short_prompts_pass_long_ones_and_nobody_starves() -> None:
    engine = RecordingEngine(LONG)
    source = random.Random(6)
    async with linked_target(engine, prefill_chunk=64) as events:
        await engine.hold(events, target_open(8, (5, 5)))
        for i, length in ((1, 1500), (2, 1500), (3, 20)):
            events.send(target_open(i, source.choices(range(32), k=length)))
        await events.handled()
        engine.go.set()
        for i in (3, 1, 2):
            await events.of(TargetOpened, i)
    shares = [{item.session: len(item.token_ids) for item in plan.items} for plan in engine.plans]
    last = {session: max(n for n, each in enumerate(shares) if session in each) for session in (2, 3, 4)}
    assert last[4] <= 2
    assert abs(last[2] - last[3]) <= 1
    assert all(sum(each.values()) <= 64 for each in shares)


async def test_the_last_chunk_brings_the_first_round_along(engine: RecordingEngine, target: Events) -> None:
    own = own_tokens(SYSTEM[:20], 3)
    target.send(target_open(1, SYSTEM[:20]))
    verdict = await verdict_of(target, first_round(1, SYSTEM[:20], chain(own[:2])))
    assert (await target.of(TargetOpened, 1)).timings.rows == 6
    assert verdict.token_ids == tuple(own)
    assert len(engine.plans) == 2
    (item,) = engine.plans[-1].items
    assert (item.base_length, len(item.token_ids), item.logit_rows) == (16, 6, (3, 4, 5))
    follow = Round(1, 22, 1, (own[2],))
    assert (await verdict_of(target, follow)).token_ids == (next_token([*SYSTEM[:20], *own]),)


async def test_a_step_has_an_upper_bound_of_rows() -> None:
    engine = RecordingEngine()
    prefixes = {i: (i, i + 1) for i in range(1, 9)}
    async with linked_target(engine, max_step_rows=128) as events:
        await events.open(*(target_open(i, prefix) for i, prefix in prefixes.items()))
        engine.plans.clear()
        events.send(*(first_round(i, prefix, chain([1] * 39)) for i, prefix in prefixes.items()), urgent=True)
        for i in prefixes:
            await events.of(Verdict, i)
    assert max(plan.rows for plan in engine.plans) == 120
    assert Counter(item.session for plan in engine.plans for item in plan.items) == Counter(prefixes.keys())
