from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protocol import codec
from paceline.protocol.errors import (
    InvalidInput,
    PacelineError,
    PeerUnavailable,
    ProtocolMismatch,
    VocabularyMismatch,
)
from paceline.protocol.handshake import MAX_FRAME_BYTES, MAX_FRAME_MESSAGES, Fingerprint, Hello, Welcome
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import TargetOpened, Verdict
from paceline.rpc import frames as frames_module
from paceline.rpc import peer_link
from paceline.rpc import servicer as link_module
from paceline.rpc.channel import Keepalive
from paceline.rpc.peer_link import TargetLink
from paceline.v1 import target_service_pb2 as pb
from tests.rpc.harness import (
    FINGERPRINT,
    HELLO,
    PATIENCE_S,
    WELCOME,
    Client,
    ScriptedServicer,
    Servicer,
    a_round,
    a_verdict,
    an_open,
    end_of,
    error_of,
    hello_frame,
    raw_stream,
    serving,
    silent_listener,
    until,
    welcome_frame,
    welcomed_stream,
)

ROOT = Path(__file__).resolve().parents[2]


async def test_open_and_round_are_answered_in_one_session(servicer: Servicer, client: Client) -> None:
    session = client.link.next_session_id()
    client.send(an_open(session))
    client.send(a_round(session), urgent=True)
    await until(lambda: len(client.events) == 2)
    assert client.events == [TargetOpened(session), a_verdict(session)]
    assert servicer.handlers[0].commands == [an_open(session), a_round(session)]
    await client.link.close()
    await until(lambda: servicer.ended)
    assert servicer.handlers[0].closed_count == 1
    assert client.ups == [WELCOME]
    assert len(client.downs) == 1
    with pytest.raises(PeerUnavailable, match="target at 127"):
        client.send(an_open(session + 1))


async def test_a_frames_events_are_delivered_before_anything_is_written(servicer: Servicer, client: Client) -> None:
    rounds = 0

    def answer(event: Any) -> None:
        nonlocal rounds
        client.events.append(event)
        if event.base_length < 10:
            rounds += 1
            client.send(a_round(event.session_id, event.base_length + 1), urgent=True)

    client.link.on_event = answer
    client.send(*(a_round(session, base_length=0) for session in range(1, 17)), urgent=True)
    await until(lambda: len(client.events) == 16 * 11)
    assert rounds == 160
    assert client.frames_sent == servicer.handlers[0].writer.frames_sent == 11


async def test_an_error_is_a_failure_of_its_session_alone_which_a_defect_closes(
    servicer: Servicer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    servicer.errors |= {2: InvalidInput.of("session_id", 2, "a new id"), 3: ZeroDivisionError("boom")}
    client.send(*map(an_open, (1, 2, 3, 4)))
    await until(lambda: len(client.events) == 4)
    opened, refused, broken, after = client.events
    assert (opened, after) == (TargetOpened(1), TargetOpened(4))
    assert isinstance(refused, Failure)
    assert isinstance(broken, Failure)
    assert (refused.session_id, refused.reason, refused.session_closed) == (2, "INVALID_INPUT", False)
    assert refused.metadata["field"] == "session_id"
    assert (broken.session_id, broken.reason, broken.session_closed) == (3, "INTERNAL", True)
    assert [each for each in servicer.handlers[0].commands if isinstance(each, Close)] == [Close(3)]
    assert "boom" in caplog.text
    assert not client.downs


async def test_defect_in_a_callback_of_the_client_is_logged_and_the_link_lives(
    caplog: pytest.LogCaptureFixture, client: Client
) -> None:
    seen: list[int] = []

    def fail_once(event: Any) -> None:
        seen.append(event.session_id)
        if len(seen) == 1:
            raise ZeroDivisionError("callback")

    client.link.on_event = fail_once
    client.send(*map(an_open, (1, 2)))
    await until(lambda: len(seen) == 2)
    assert client.link.is_up
    assert "callback" in caplog.text


async def test_malformed_command_names_its_session_and_leaves_the_others_alone(port: int) -> None:
    async with welcomed_stream(port) as stream:
        bad = pb.TargetCommand(round=pb.Round(session_id=9))
        unset = pb.TargetCommand()
        good = codec.encode_target_command(an_open(10))
        await stream.write(pb.VerifyRequest(commands=[bad, unset, good]))
        events: list[Any] = []
        while len(events) < 3:
            events += (await stream.read()).events
        assert [codec.session_id_of(event) for event in events] == [9, 0, 10]
        assert events[0].failure.reason == events[1].failure.reason == "INVALID_INPUT"
        assert "committed" in events[0].failure.message
        assert events[2].HasField("opened")


async def test_malformed_event_reaches_its_session_as_a_failure(servicer: Servicer, client: Client) -> None:
    await until(lambda: servicer.handlers)
    writer = servicer.handlers[0].writer
    writer.send(Verdict(4, 0, ()))
    writer.send(TargetOpened(5))
    await until(lambda: len(client.events) == 2)
    failure, opened = client.events
    assert isinstance(failure, Failure)
    assert (failure.session_id, failure.reason) == (4, "PEER_UNAVAILABLE"), "it may be had of another peer"
    assert "malformed" in failure.message
    assert failure.metadata["field"] == "verdict token_ids"
    assert opened == TargetOpened(5)


def frame_of(*commands: pb.TargetCommand) -> pb.VerifyRequest:
    return pb.VerifyRequest(commands=commands)


def large_frame(tokens: int) -> pb.VerifyRequest:
    return frame_of(pb.TargetCommand(open=pb.TargetOpen(spec={"token_ids": [1 << 31] * tokens})))


TOO_MANY = MAX_FRAME_MESSAGES + 1


@pytest.mark.parametrize(
    ("frames", "kind", "words"),
    [
        ([frame_of(pb.TargetCommand())], ProtocolMismatch, "hello"),
        ([hello_frame(), hello_frame()], ProtocolMismatch, "second hello"),
        ([hello_frame(Hello("x", Fingerprint(vocab_size=65)))], VocabularyMismatch, "vocab_size = 64"),
        ([hello_frame(), large_frame(MAX_FRAME_BYTES // 4)], InvalidInput, f"at most {MAX_FRAME_BYTES}"),
        (
            [hello_frame(), frame_of(*[pb.TargetCommand()] * TOO_MANY)],
            InvalidInput,
            f"frame messages = {TOO_MANY}: must be at most {MAX_FRAME_MESSAGES}",
        ),
        ([hello_frame(), large_frame(MAX_FRAME_BYTES)], InvalidInput, "larger than max"),
    ],
)
async def test_malformed_frame_ends_the_link_with_a_typed_status(
    frames: list[pb.VerifyRequest], kind: type[PacelineError], words: str, servicer: Servicer, port: int
) -> None:
    async def send_and_read(stream: Any) -> None:
        for frame in frames:
            await stream.write(frame)
        await end_of(stream)

    async with raw_stream(port) as stream:
        error = await error_of(send_and_read(stream))
        assert type(error) is kind
        assert words in error.message
    await until(lambda: servicer.ended == 1)
    assert all(handler.closed_count == 1 for handler in servicer.handlers)
    async with Client(port) as client:
        await client.link.wait_up(10)
        await client.is_served()


async def test_a_frame_of_too_many_events_costs_the_peer_its_link_and_nobody_else_a_moment(
    servicer: Servicer, port: int
) -> None:
    async with Client(port, reconnect_min_ms=1) as client:
        await client.link.wait_up(10)
        await until(lambda: servicer.handlers)
        servicer.handlers[0].writer.show_life(pb.VerifyResponse(events=[pb.TargetEvent()] * 170_000))
        await until(lambda: client.downs)
        assert client.downs[0].metadata["cause"] == "INVALID_INPUT"
        assert f"frame messages = 170000: must be at most {MAX_FRAME_MESSAGES}" in client.downs[0].message
        assert client.events == []
        await client.link.wait_up(10)
        await client.is_served()


async def test_no_hello_in_time_is_refused(monkeypatch: pytest.MonkeyPatch, servicer: Servicer, port: int) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_TIMEOUT_S", 0.05)
    async with raw_stream(port) as stream:
        assert "no hello" in (await error_of(stream.read())).message
    assert not servicer.handlers


async def test_message_larger_than_a_frame_is_refused_by_the_sender(client: Client) -> None:
    with pytest.raises(InvalidInput, match=r"bytes of TargetOpen = \d+: must be at most 1048576"):
        client.send(an_open(1, tokens=400_000))
    await client.is_served()


@pytest.mark.parametrize("end", ["cancel", "half-close"])
async def test_a_call_that_ends_frees_the_handler_once(end: str, servicer: Servicer, port: int) -> None:
    async with welcomed_stream(port) as stream:
        await until(lambda: servicer.handlers)
        if end == "cancel":
            stream.cancel()
        else:
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
        await until(lambda: servicer.ended == 1)
    assert [handler.closed_count for handler in servicer.handlers] == [1]


async def test_server_that_stops_brings_the_link_down_once_and_a_new_one_brings_it_up() -> None:
    async with serving(Servicer()) as port:
        client = Client(port, reconnect_max_ms=100)
        await client.link.start()
        await client.link.wait_up(10)
    await until(lambda: client.downs)
    assert isinstance(client.downs[0], PeerUnavailable)
    assert "target at 127.0.0.1" in client.downs[0].message
    with pytest.raises(PeerUnavailable, match=f"target at 127.0.0.1:{port}"):
        await client.link.wait_up(0.01)
    restarted = Servicer(Welcome("server-2", FINGERPRINT, 4096, 64))
    async with serving(restarted, port):
        welcome = await client.link.wait_up(10)
        assert welcome.incarnation == "server-2"
        assert (len(client.ups), len(client.downs)) == (2, 1)
        await client.link.close()
    assert len(client.downs) == 2


async def test_dropped_link_is_down_at_once_and_comes_back(servicer: Servicer, client: Client) -> None:
    await until(lambda: servicer.handlers)  # opened behind the welcome; a drop before that leaves none to close
    error = PeerUnavailable("silent")
    client.link.drop(error)
    assert client.downs == [error]
    assert not client.link.is_up
    await client.link.wait_up(10)
    assert (len(client.ups), len(client.downs)) == (2, 1)
    await until(lambda: servicer.handlers[0].closed_count == 1)


async def welcome_twice(link: int, context: Any) -> None:
    """Break the rules on the first link, and keep them ever after."""
    for _ in range(2 if link == 1 else 1):
        await context.write(welcome_frame())


async def test_a_peer_that_breaks_the_rules_is_lost_and_not_refused() -> None:
    async with serving(servicer := ScriptedServicer(welcome_twice)) as port, Client(port) as client:
        await until(lambda: client.downs)
        assert isinstance(client.downs[0], PeerUnavailable)
        assert "second welcome" in client.downs[0].message
        assert not client.link.is_refused
        await client.link.wait_up(10)
        assert servicer.links == 2


@pytest.mark.parametrize(
    ("hello", "kind"),
    [
        (Hello("c", Fingerprint(tokenizer="other")), VocabularyMismatch),
        (Hello("c", Fingerprint(numeric="bf16")), ProtocolMismatch),
        (Hello("c", protocol_version=2), ProtocolMismatch),
    ],
)
async def test_refused_handshake_is_kept_logged_once_and_tried_again(
    hello: Hello, kind: type[PacelineError], caplog: pytest.LogCaptureFixture, servicer: Servicer, port: int
) -> None:
    async with Client(port, hello, reconnect_min_ms=1, reconnect_max_ms=5) as client:
        with pytest.raises(kind):
            await client.link.wait_up(10)
        await until(lambda: servicer.ended >= 3)
        assert type(client.link.last_error) is kind
        assert not client.ups
        assert not client.downs
    assert sum("no link" in record.message for record in caplog.records) == 1


async def test_close_ends_a_link_whose_call_answers_a_cancellation_with_its_status(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def greet(link: TargetLink, call: Any) -> Welcome:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ProtocolMismatch("the status came first") from None
        raise AssertionError

    monkeypatch.setattr(TargetLink, "_greet", greet)
    async with asyncio.timeout(PATIENCE_S), Client(port, reconnect_min_ms=1, reconnect_max_ms=5):
        await begun.wait()


async def test_empty_fingerprint_fits_any_vocabulary() -> None:
    ngram = Servicer(Welcome("draft-1", Fingerprint(model="ngram"), 4096, 64))
    async with serving(ngram) as port, Client(port, HELLO) as client:
        assert (await client.link.wait_up(10)).fingerprint.model == "ngram"


async def test_black_hole_is_not_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with silent_listener() as port, Client(port, reconnect_min_ms=1, reconnect_max_ms=5) as client:
        await until(lambda: client.link.last_error)
        with pytest.raises(PeerUnavailable, match=rf"target at 127.0.0.1:{port}.*did not answer"):
            await client.link.wait_up(0.05)


@asynccontextmanager
async def peer_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A process of `peer_process`, and its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.rpc.peer_process", *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process, int(await process.stdout.readline())
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_process_that_stops_and_is_killed_takes_its_links_down_once(servicer: Servicer, port: int) -> None:
    async with (
        peer_process(str(port)) as (process, its_port),
        Client(its_port, keepalive=Keepalive(time_ms=200, timeout_ms=200)) as watchful,
        Client(its_port) as other,
    ):
        for client in (watchful, other):
            await client.link.wait_up(20)
            await client.is_served()
        await until(lambda: servicer.handlers)
        process.send_signal(signal.SIGSTOP)
        await until(lambda: watchful.downs)
        assert not other.downs
        process.kill()
        await until(lambda: other.downs and servicer.ended)
        assert servicer.handlers[0].closed_count == 1
        for client in (watchful, other):
            (down,) = client.downs
            assert isinstance(down, PeerUnavailable)
            with pytest.raises(PeerUnavailable):
                client.send(a_round(1))


async def test_a_client_that_reads_nothing_loses_its_link_and_its_sessions(
    monkeypatch: pytest.MonkeyPatch, servicer: Servicer, port: int
) -> None:
    monkeypatch.setattr(frames_module, "MAX_WAITING_BYTES", 1 << 20)
    async with welcomed_stream(port) as stream:
        await until(lambda: servicer.handlers)
        writer = servicer.handlers[0].writer
        # Large, since gRPC takes some megabytes in before it lets a writer wait.
        event = codec.failure_of(1, PeerUnavailable("x" * 200_000), session_closed=False)
        async with asyncio.timeout(20):
            while not servicer.handlers[0].closed_count:
                writer.send(event)
                await asyncio.sleep(0)
        assert writer._waiting_bytes <= (1 << 20) + MAX_FRAME_BYTES, "nothing was gathered beyond the bound"
        error = await error_of(end_of(stream))
        assert isinstance(error, PeerUnavailable), "once it reads it is told why"
        assert "bytes unread" in error.message
