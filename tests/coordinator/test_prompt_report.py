"""A prompt's report between a target that is lost and a client that doesn't read: every token once, and bounded."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from coordinator.prepare import ServedModel, prepare
from coordinator.text import outbox as outbox_module
from coordinator.text.outbox import Outbox
from paceline.client.shared import Progress
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput, PeerUnavailable, ProtocolMismatch, Unsupported
from paceline.protocol.generation import GenerateRequest, PromptLogprobs, Provenance, Started, Tokens
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.session import Close
from paceline.protocol.target import PromptPiece, RowLogprobs, TargetOpen
from tests.coordinator.requests import RecordingLink, StreamReader, TargetRequest, turns

PROMPT = tuple(range(10, 20))
ALTERNATIVES = 2


def reporting(numeric: str = "n", *, reports: bool = True) -> RecordingLink:
    """A link to a target that reports prompts, or to an older one."""
    return RecordingLink(fingerprint=Fingerprint(numeric=numeric), reports_prompts=reports, max_prefetched=64)


class Reader:
    """Keeps what is put; full when a test says so."""

    def __init__(self) -> None:
        self.rows: list[RowLogprobs] = []
        self.is_full = False
        self.read = asyncio.Event()

    def put_prompt(self, rows: PromptLogprobs) -> None:
        assert rows.first_position == len(self.rows) + 1
        self.rows += rows.rows

    async def wait_for_reader(self) -> None:
        await self.read.wait()
        self.is_full = False


def rows_about(first: int, count: int) -> tuple[RowLogprobs, ...]:
    return tuple(RowLogprobs((PROMPT[at], 1, 2), (-1.0 * at, -0.1, -0.2)) for at in range(first, first + count))


WHOLE = rows_about(1, len(PROMPT) - 1)


class ReportedRequest(TargetRequest):
    """A request that asks for its prompt's report."""

    def __init__(self, *links: RecordingLink) -> None:
        super().__init__(*(links or [reporting()]), prompt=PROMPT, prompt_logprobs=ALTERNATIVES)
        self.reader = Reader()
        self.session.prompt.reader = self.reader

    def piece(self, first: int, count: int, session: int = 1, link: int = 0) -> None:
        """Log-probabilities arrive."""
        self.links[link].on_event(PromptPiece(session, first, rows_about(first, count)))

    def opened(self, link: int = 0) -> tuple[int | None, int]:
        """What the session that was opened since the last look asks for, and what it says is known."""
        (opened,) = self.links[link].take_only(TargetOpen)
        return opened.prompt_logprobs, opened.prompt_logprobs_known


@pytest.mark.parametrize(("first", "count"), [(4, 2), (2, 2), (1, 2), (3, 8)], ids=["gap", "overlap", "again", "end"])
async def test_a_piece_that_is_not_the_next_ends_the_request(first: int, count: int) -> None:
    request = ReportedRequest()
    waits = await request.pending()
    request.piece(1, 2)
    request.link.on_event(PromptPiece(1, first, (RowLogprobs((1,), (0.0,)),) * count))
    message = f"tokens {first} to {first + count - 1}, expected those from 3 on, up"
    with pytest.raises(ProtocolMismatch, match=message):
        await waits
    assert tuple(request.reader.rows) == WHOLE[:2]


async def test_a_verdict_before_the_whole_report_ends_the_request() -> None:
    request = ReportedRequest()
    waits = await request.pending()
    request.piece(1, 8)
    request.answer(len(PROMPT) - 1)
    with pytest.raises(ProtocolMismatch, match="8 of the prompt's 9 tokens"):
        await waits


async def test_a_report_is_asked_for_until_it_is_whole_and_from_targets_of_the_same_bits() -> None:
    links = reporting("a"), reporting("b"), reporting("a")
    request = ReportedRequest(*links)
    waits = await request.pending()
    assert request.opened() == (ALTERNATIVES, 0)
    request.piece(1, 4)
    links[0].is_up = False
    await request.lose()
    assert not links[1].sent, "its values differ in their last bits"
    assert request.opened(2) == (ALTERNATIVES, 4), "the rest of it"
    request.piece(5, 5, link=2)
    links[2].on_down(PeerUnavailable("gone"))
    await turns()
    assert request.opened(2) == (None, 0), "all is known"
    request.answer(len(PROMPT) - 1, session=2, link=2)
    await waits
    assert tuple(request.reader.rows) == WHOLE


async def test_an_older_target_is_never_asked() -> None:
    links = reporting(reports=False), reporting()
    request = ReportedRequest(*links)
    waits = await request.pending()
    assert not links[0].sent
    assert request.opened(1) == (ALTERNATIVES, 0)
    waits.cancel()
    alone = ReportedRequest(reporting(reports=False))
    alone.pool.wait_s = 0.0
    with pytest.raises(PeerUnavailable, match="version"):
        await alone.round()


def test_a_request_that_no_target_here_knows_is_refused_by_name() -> None:
    served = ServedModel("table", TableTokenizer(32, None), 256, (), reports_prompts=False)
    with pytest.raises(Unsupported, match="prompt_logprobs = 0: the target's version has no such parameter"):
        prepare(GenerateRequest(token_ids=PROMPT, prompt_logprobs=0), served)
    assert prepare(GenerateRequest(token_ids=PROMPT), served).prompt_logprobs is None


async def test_a_client_that_does_not_read_ends_the_session_and_gets_the_rest_later() -> None:
    request = ReportedRequest()
    waits = await request.pending()
    request.link.take()
    request.reader.is_full = True
    request.piece(1, 3)
    await turns()
    assert request.link.take_kinds() == [Close]
    request.piece(4, 2)
    assert len(request.reader.rows) == 3, "what is still on its way is dropped"
    request.reader.read.set()
    await turns()
    assert request.opened() == (ALTERNATIVES, 3)
    request.piece(4, 6, session=2)
    request.answer(len(PROMPT) - 1, session=2)
    await waits
    assert tuple(request.reader.rows) == WHOLE


async def test_a_report_is_written_piece_by_piece_before_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_UNREAD_BYTES", 200)
    reader = StreamReader()
    outbox = Outbox(reader.write, lambda: None)
    writer = asyncio.ensure_future(outbox.run())
    pieces = [PromptLogprobs(1, WHOLE[:4]), PromptLogprobs(5, WHOLE[4:])]
    full = []
    for piece in pieces:
        outbox.put_prompt(piece)
        full.append(outbox.is_full)
    assert full == [False, True], "nine rows of three ids, 12 bytes each"
    text = Tokens((1,), "a", (Provenance.TARGET,))
    outbox.put(text)
    waiting = asyncio.ensure_future(outbox.wait_for_reader())
    await turns()
    assert not waiting.done()
    reader.may_read.set()
    await waiting
    writer.cancel()
    assert reader.messages == [*pieces, text]
    assert not outbox.is_full


def test_a_client_keeps_what_a_resumed_stream_brings_again_once() -> None:
    progress = Progress(GenerateRequest(token_ids=PROMPT, prompt_logprobs=ALTERNATIVES))
    started = Started(3, PROMPT, "model")
    assert progress.take(started) == started
    assert progress.take(wire_rows(1, 5)) == wire_rows(1, 5)
    assert progress.rest.prompt_logprobs == ALTERNATIVES, "the report goes on"
    assert progress.take(started) is None
    assert progress.take(wire_rows(1, 3)) is None
    assert progress.take(wire_rows(4, 4)) == wire_rows(6, 2)
    with pytest.raises(InvalidInput, match="first_position = 9: must be at most 8"):
        progress.take(wire_rows(9, 1))
    assert progress.take(wire_rows(8, 2)) == wire_rows(8, 2)
    assert progress.rest.prompt_logprobs is None, "it is whole"


def wire_rows(first: int, count: int) -> PromptLogprobs:
    """Rows as the wire has them, in float32."""
    rows = (
        replace(row, logprobs=tuple(np.asarray(row.logprobs, np.float32).tolist()))
        for row in rows_about(first, count)
    )
    return PromptLogprobs(first, tuple(rows))
