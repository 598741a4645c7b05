"""Rounds beside a link that answers as a target does: how many a slow client lets be leased."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from coordinator.drafting.drafting import Drafting
from coordinator.drafting.prefetch import Prefetching
from coordinator.drafting.settings import DraftingSettings
from coordinator.observer import RequestObserver
from coordinator.policy.planner import Planner
from coordinator.round import run_rounds
from coordinator.sessions.target import TargetSession
from coordinator.sessions.target_pool import TargetPool
from coordinator.stats import StatsBuilder
from coordinator.text import outbox as outbox_module
from coordinator.text.outbox import MOST_BYTES_PER_TOKEN, Outbox
from coordinator.text.sequence import Sequence
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.target import Round, TargetCommand, Verdict
from paceline.runtime.telemetry import RequestTrace
from tests.coordinator.requests import PROMPT, VOCAB, RecordingLink, StreamReader, target_peer, task_of

LENGTH = 57


class AnsweringLink(RecordingLink):
    """A target whose steps take one turn of the loop each, for rounds that are sent and for those they grant."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = len(PROMPT) - 2
        """Base length of the last round that was answered."""
        self.leased = self.computed
        self._running: asyncio.Task[None] | None = None

    def send(self, command: TargetCommand, urgent: bool = False) -> None:
        super().send(command, urgent)
        if isinstance(command, Round):
            self.leased = max(self.leased, command.base_length + command.lease)
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(self._run(command.session_id))

    async def _run(self, session_id: int) -> None:
        while self.computed < self.leased:
            await asyncio.sleep(0)
            self.computed += 1
            self.on_event(Verdict(session_id, self.computed, (7,)))


class RoundsRequest:
    """A target-only request whose rounds run, each client reading in its own way."""

    def __init__(self, link: RecordingLink, *, reads: bool = True) -> None:
        self.task = task_of(speculation=SpeculationSettings(off=True))
        self.sequence = Sequence(self.task, TableTokenizer(VOCAB, None))
        pool = TargetPool([target_peer(link)], round_timeout_s=10, wait_s=10)
        self.target = TargetSession(pool, self.task)
        self.reader, self.stats = StreamReader(reads=reads), StatsBuilder(0.0)

    async def run(self) -> None:
        outbox = Outbox(self.reader.write, self.target.close)
        writer = asyncio.create_task(outbox.run())
        drafting = Drafting(self.task, self.sequence, None, Planner(), DraftingSettings())
        trace = RequestTrace()
        try:
            with RequestObserver("", None) as observer:
                await run_rounds(self.task, self.sequence, self.target, drafting, outbox, self.stats, trace, observer)
        finally:
            writer.cancel()


async def test_a_client_that_does_not_read_bounds_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_UNREAD_BYTES", 5 * MOST_BYTES_PER_TOKEN)
    monkeypatch.setattr(outbox_module, "BYTES_PER_TOKEN", MOST_BYTES_PER_TOKEN)
    link = AnsweringLink()
    request = RoundsRequest(link, reads=False)
    rounds = asyncio.create_task(request.run())
    for _ in range(500):
        await asyncio.sleep(0)
    committed = len(request.sequence.ids) - len(PROMPT)
    assert 5 <= committed <= 7
    assert link.computed - len(PROMPT) + 2 <= 7, "what was computed is what may be buffered, and the round in flight"
    request.reader.may_read.set()
    await asyncio.wait_for(rounds, 10)
    assert len(request.sequence.ids) == len(PROMPT) + LENGTH


async def test_nothing_is_left_to_prefetch_for_a_round_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Prefetching] = []
    monkeypatch.setattr(Prefetching, "end", lambda prefetching: ended.append(prefetching))
    request = RoundsRequest(RecordingLink())
    monkeypatch.setattr(request.target, "verify", mock.AsyncMock(side_effect=PeerUnavailable("the target is dead")))
    with pytest.raises(PeerUnavailable):
        await request.run()
    assert len(ended) == 1


async def test_a_whole_text_takes_few_messages() -> None:
    link = AnsweringLink()
    request = RoundsRequest(link)
    await request.run()
    assert len(request.sequence.ids) == len(PROMPT) + LENGTH
    assert len(link.take_only(Round)) <= 1 + LENGTH / 8
    records = request.stats.build().records
    assert [record.base_length for record in records] == [len(PROMPT) - 1 + place for place in range(LENGTH)]
    assert [record.self_started for record in records] == [False] + [True] * (LENGTH - 1)
    assert link.leased == len(PROMPT) + LENGTH - 2, "nothing is leased beyond the text"
