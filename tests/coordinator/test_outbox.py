from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from coordinator.text import outbox as module
from coordinator.text.outbox import MAX_UNREAD_BYTES, MOST_BYTES_PER_TOKEN, Outbox, merge, size_of
from paceline.protocol import codec
from paceline.protocol.errors import Cancelled
from paceline.protocol.generation import Provenance, Tokens
from paceline.protocol.records import RoundRecord, StepTimings
from tests.coordinator.requests import StreamReader


def tokens(text: str) -> Tokens:
    return Tokens((1,), text, (Provenance.TARGET,))


async def test_pending_text_coalesces_into_one_write() -> None:
    reader = StreamReader()
    outbox = Outbox(reader.write, lambda: None)
    writer = asyncio.ensure_future(outbox.run())
    outbox.put(tokens("a"))
    await asyncio.sleep(0)
    outbox.put(tokens("b"))
    outbox.put(tokens("c"))
    reader.may_read.set()
    await outbox.drain()
    writer.cancel()
    assert reader.messages == [tokens("a"), merge([tokens("b"), tokens("c")])]


def test_a_record_takes_no_more_bytes_than_are_counted() -> None:
    most, timings = (1 << 32) - 1, StepTimings(1.1, 1.1, 1.1, 1.1, (1 << 32) - 1, (1 << 32) - 1)
    drafter = "x" * 500
    record = RoundRecord(most, 1.1, 1.1, 1.1, timings, 1.1, most, most, True, drafter, timings, True, True, 1.1)
    sizes = []
    for records in ((), (record,), (record, record)):
        event = replace(tokens("a"), records=records)
        message = codec.encode_generate_event(event).tokens
        sizes.append((message.ByteSize(), size_of(event)))
    grown = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(sizes)]
    assert grown[0] == grown[1]
    assert 0.9 * grown[0][1] < grown[0][0] <= grown[0][1]
    assert merge([event, event]).records == (record,) * 4


@pytest.mark.parametrize("comes_back", [False, True])
async def test_an_unread_stream_frees_its_kv_then_is_cancelled_unless_its_reader_comes_back(
    comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FREE_AFTER_S", 0.01)
    if not comes_back:
        monkeypatch.setattr(module, "CANCEL_AFTER_S", 0.03)
    reader = StreamReader()
    free = mock.Mock(side_effect=reader.may_read.set if comes_back else None)
    outbox = Outbox(reader.write, free)
    writer = asyncio.ensure_future(outbox.run())
    outbox.put(tokens("x" * (MAX_UNREAD_BYTES + 1)))
    cancelled = pytest.raises(Cancelled, match=str(MAX_UNREAD_BYTES))
    ends: AbstractContextManager[Any] = nullcontext() if comes_back else cancelled
    with ends:
        await outbox.has_room()
    free.assert_called_once_with()
    writer.cancel()


def test_merged_text_ends_count_from_the_start() -> None:
    first = Tokens((1, 2), "ab", (Provenance.TARGET,) * 2, text_ends=(1, 2))
    second = Tokens((3,), "cd", (Provenance.BONUS,), text_ends=(2,))
    merged = merge([first, second])
    assert merged == Tokens((1, 2, 3), "abcd", (*first.provenance, *second.provenance), (), (1, 2, 4))


async def test_no_more_may_be_on_its_way_than_there_is_room_for() -> None:
    outbox = Outbox(StreamReader().write, lambda: None)
    assert outbox.room == MAX_UNREAD_BYTES // MOST_BYTES_PER_TOKEN
    outbox.put(tokens("a" * (MAX_UNREAD_BYTES - 3 * MOST_BYTES_PER_TOKEN)))
    assert outbox.room == 2
    outbox.put(tokens("a" * MAX_UNREAD_BYTES))
    assert outbox.room == 0
