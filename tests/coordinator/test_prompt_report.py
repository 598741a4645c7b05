"""A prompt's report between a target that is lost and a client that doesn't read: every token once, and bounded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from coordinator.prepare import ServedModel, prepare
from coordinator.sessions.target import TargetSession
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from coordinator.text import outbox as outbox_module
from coordinator.text.outbox import Outbox
from paceline.client.shared import Progress
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput, PeerUnavailable, ProtocolMismatch, Unsupported
from paceline.protocol.generation import GenerateRequest, PromptLogprobs, Provenance, Started, Tokens
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.session import Close
from paceline.protocol.target import PromptPiece, Round, RowLogprobs, TargetOpen, Verdict
from paceline.rpc.peer_link import TargetLink
from tests.coordinator.test_target_session import RecordingLink, Request, pending, turns

PROMPT = tuple(range(10, 20))
ALTERNATIVES = 2


class ReportingLink(RecordingLink):
    """Stands for a link to a target that reports prompts, or to an older one."""

    def __init__(self, numeric: str = "n", *, reports: bool = True) -> None:
        super().__init__()
        self.welcome = replace(
            self.welcome, fingerprint=Fingerprint(numeric=numeric), reports_prompts=reports, max_prefetched=64
        )


class Reader:
    """Notes what it is given; full when a test says so."""

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


class ReportedRequest(Request):
    """A request that wants its prompt's report."""

    def __init__(self, *links: RecordingLink) -> None:
        super().__init__(links[0])
        self.links = links
        self.reader = Reader()
        self.pool = TargetPool([TargetPeer(cast(TargetLink, link)) for link in links], round_timeout_s=10, wait_s=10)
        task = replace(self.task, prompt=PROMPT, prompt_logprobs=ALTERNATIVES)
        self.session = TargetSession(self.pool, task)
        self.session.prompt.reader = self.reader
        self.ids = [*PROMPT]

    def piece(self, first: int, count: int, session: int = 1, link: int = 0) -> None:
        """Log-probabilities arrive."""
        cast(Any, self.links[link]).on_event(PromptPiece(session, first, rows_about(first, count)))

    def opened(self, link: int = 0) -> TargetOpen:
        """The session that was opened since the last look."""
        (found,) = (command for command in self.links[link].take() if isinstance(command, TargetOpen))
        return found


async def test_a_report_is_asked_for_until_it_is_whole() -> None:
    request = ReportedRequest(ReportingLink())
    first = await pending(request)
    opened = request.opened()
    assert (opened.prompt_logprobs, opened.prompt_logprobs_known) == (ALTERNATIVES, 0)
    request.piece(1, 4)
    request.lose()
    await turns()
    opened = request.opened()
    assert (opened.prompt_logprobs, opened.prompt_logprobs_known) == (ALTERNATIVES, 4), "the rest of it"
    request.piece(5, 5, session=2)
    request.lose()
    await turns()
    opened = request.opened()
    assert (opened.prompt_logprobs, opened.prompt_logprobs_known) == (None, 0), "all is known"
    request.answer(len(PROMPT) - 1, session=3)
    await first
    assert tuple(request.reader.rows) == WHOLE


@pytest.mark.parametrize(("first", "count"), [(4, 2), (2, 2), (1, 2), (3, 8)], ids=["gap", "overlap", "again", "end"])
async def test_a_piece_that_is_not_the_next_ends_the_request(first: int, count: int) -> None:
    request = ReportedRequest(ReportingLink())
    waits = await pending(request)
    request.piece(1, 2)
    piece = PromptPiece(1, first, (RowLogprobs((1,), (0.0,)),) * count)
    cast(Any, request.link).on_event(piece)
    with pytest.raises(
        ProtocolMismatch, match=f"tokens {first} to {first + count - 1}, expected those from 3 on, up"
    ):
        await waits
    assert tuple(request.reader.rows) == WHOLE[:2]


async def test_a_verdict_before_the_whole_report_ends_the_request() -> None:
    request = ReportedRequest(ReportingLink())
    waits = await pending(request)
    request.piece(1, 8)
    request.answer(len(PROMPT) - 1)
    with pytest.raises(ProtocolMismatch, match="8 of the prompt's 9 tokens"):
        await waits


async def test_the_rest_comes_from_a_target_of_the_same_bits() -> None:
    links = (ReportingLink("a"), ReportingLink("b"), ReportingLink("a"))
    request = ReportedRequest(*links)
    waits = await pending(request)
    placed = next(at for at, link in enumerate(links) if link.sent)
    assert placed == 0
    request.opened(placed)
    request.piece(1, 4, link=placed)
    links[0].is_up = False
    request.lose()
    await turns()
    assert not links[1].sent, "its values differ in their last bits"
    assert request.opened(2).prompt_logprobs_known == 4
    request.piece(5, 5, session=1, link=2)
    cast(Any, links[2]).on_event(Verdict(1, len(PROMPT) - 1, (7,)))
    await waits
    assert tuple(request.reader.rows) == WHOLE


async def test_an_older_target_is_never_asked() -> None:
    links = (ReportingLink(reports=False), ReportingLink())
    request = ReportedRequest(*links)
    waits = await pending(request)
    assert not links[0].sent
    assert request.opened(1).prompt_logprobs == ALTERNATIVES
    waits.cancel()
    alone = ReportedRequest(ReportingLink(reports=False))
    alone.pool.wait_s = 0.0
    with pytest.raises(PeerUnavailable, match="version"):
        await alone.round()


def test_a_request_that_no_target_here_knows_is_refused_by_name() -> None:
    served = ServedModel("table", TableTokenizer(32, None), 256, (), reports_prompts=False)
    with pytest.raises(Unsupported, match="prompt_logprobs = 0: the target's version has no such parameter"):
        prepare(GenerateRequest(token_ids=PROMPT, prompt_logprobs=0), served)
    assert prepare(GenerateRequest(token_ids=PROMPT), served).prompt_logprobs is None


async def test_a_client_that_does_not_read_ends_the_session_and_gets_the_rest_later() -> None:
    request = ReportedRequest(ReportingLink())
    waits = await pending(request)
    request.link.take()
    request.reader.is_full = True
    request.piece(1, 3)
    await turns()
    assert [type(command) for command in request.link.take()] == [Close]
    request.piece(4, 2)
    assert len(request.reader.rows) == 3, "what is still on its way is dropped"
    request.reader.read.set()
    await turns()
    opened, round_ = request.link.take()
    assert isinstance(opened, TargetOpen)
    assert isinstance(round_, Round)
    assert opened.prompt_logprobs_known == 3
    request.piece(4, 6, session=2)
    request.answer(len(PROMPT) - 1, session=2)
    await waits
    assert tuple(request.reader.rows) == WHOLE


async def test_a_report_is_written_piece_by_piece_before_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_UNREAD_BYTES", 200)
    written: list[PromptLogprobs | Tokens] = []
    gate = asyncio.Event()

    async def write(message: PromptLogprobs | Tokens) -> None:
        await gate.wait()
        written.append(message)

    outbox = Outbox(write, lambda: None)
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
    gate.set()
    await waiting
    writer.cancel()
    assert written == [*pieces, text]
    assert not outbox.is_full


def test_a_client_keeps_what_a_resumed_stream_brings_again_once() -> None:
    progress = Progress(GenerateRequest(token_ids=PROMPT, prompt_logprobs=ALTERNATIVES))

    def arrives(event: Started | PromptLogprobs) -> object:
        return progress.take(event)

    def asked() -> int | None:
        return progress.rest.prompt_logprobs

    started = Started(3, PROMPT, "model")
    assert arrives(started) == started
    first = PromptLogprobs(1, single(WHOLE[:5]))
    assert arrives(first) == first
    assert asked() == ALTERNATIVES, "the report goes on"
    assert arrives(started) is None
    assert arrives(PromptLogprobs(1, single(WHOLE[:3]))) is None
    assert arrives(PromptLogprobs(4, single(WHOLE[3:7]))) == PromptLogprobs(6, single(WHOLE[5:7]))
    with pytest.raises(InvalidInput, match="first_position = 9: must be at most 8"):
        arrives(PromptLogprobs(9, single(WHOLE[8:])))
    rest = PromptLogprobs(8, single(WHOLE[7:]))
    assert arrives(rest) == rest
    assert asked() is None, "it is whole"


def single(rows: tuple[RowLogprobs, ...]) -> tuple[RowLogprobs, ...]:
    """Rows as the wire has them, in float32."""
    return tuple(RowLogprobs(row.token_ids, tuple(np.array(row.logprobs, np.float32).tolist())) for row in rows)
