from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from functools import partial
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
    UnknownSession,
    VocabularyMismatch,
)
from paceline.protocol.handshake import MAX_FRAME_BYTES, MAX_FRAME_MESSAGES, Fingerprint, Hello, Welcome
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import TargetOpened, Verdict
from paceline.rpc import frames as frames_module
from paceline.rpc import link as link_module
from paceline.rpc.channel import Keepalive
from paceline.rpc.peer_link import TargetLink
from paceline.rpc.statuses import from_rpc_error
from paceline.runtime.config import PeerSettings
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from tests.rpc.harness import (
    FINGERPRINT,
    HELLO,
    WELCOME,
    Client,
    Servicer,
    a_round,
    a_verdict,
    an_open,
    hello_frame,
    raw_stream,
    serving,
    until,
)

ROOT = Path(__file__).resolve().parents[2]
FAST = Keepalive(time_ms=200, timeout_ms=200)


async def test_open_and_round_are_answered_in_one_session() -> None:
    async with serving(servicer := Servicer()) as port, Client(port) as client:
        assert await client.link.wait_up(10) == WELCOME
        session = client.link.next_session_id()
        client.link.send(an_open(session))
        client.link.send(a_round(session), urgent=True)
        await until(lambda: len(client.events) == 2)
        assert client.events == [TargetOpened(session), a_verdict(session)]
        assert servicer.handlers[0].commands == [an_open(session), a_round(session)]
        await client.link.close()
        await until(lambda: servicer.ended)
    assert servicer.handlers[0].closed_count == 1
    assert len(client.ups) == len(client.downs) == 1


async def test_many_sessions_of_one_moment_travel_in_one_frame_each_way() -> None:
    async with serving(servicer := Servicer()) as port, Client(port) as client:
        await client.link.wait_up(10)
        for session in range(1, 65):
            client.link.send(a_round(session), urgent=True)
        await until(lambda: len(client.events) == 64)
        assert client.frames_sent == 1
        assert servicer.handlers[0].writer.frames_sent == 1
        assert [event.session_id for event in client.events] == list(range(1, 65))


async def test_events_of_a_frame_are_all_delivered_before_anything_is_written() -> None:
    async with serving(Servicer()) as port, Client(port) as client:
        await client.link.wait_up(10)
        rounds = 0

        def answer(event: Any) -> None:
            nonlocal rounds
            client.events.append(event)
            if event.base_length < 10:
                rounds += 1
                client.link.send(a_round(event.session_id, event.base_length + 1), urgent=True)

        client.link.on_event = answer
        for session in range(1, 17):
            client.link.send(a_round(session, base_length=0), urgent=True)
        await until(lambda: len(client.events) == 16 * 11)
        assert rounds == 160
        assert client.frames_sent == 11


async def test_session_ids_are_never_used_twice() -> None:
    async with serving(Servicer()) as port, Client(port) as client:
        await client.link.wait_up(10)
        ids = [client.link.next_session_id() for _ in range(1000)]
        assert len(set(ids)) == 1000
        assert min(ids) >= 1


async def test_typed_error_of_one_command_is_a_failure_of_its_session_alone() -> None:
    servicer = Servicer()
    servicer.errors[2] = InvalidInput.of("session_id", 2, "a new id")
    async with serving(servicer) as port, Client(port) as client:
        await client.link.wait_up(10)
        for session in (1, 2, 3):
            client.link.send(an_open(session))
        await until(lambda: len(client.events) == 3)
        assert [type(event) for event in client.events] == [TargetOpened, Failure, TargetOpened]
        failure = client.events[1]
        assert isinstance(failure, Failure)
        assert (failure.session_id, failure.reason, failure.session_closed) == (2, "INVALID_INPUT", False)
        assert failure.metadata["field"] == "session_id"
        assert not client.downs


async def test_defect_in_a_handler_closes_the_session_and_the_link_lives(caplog: pytest.LogCaptureFixture) -> None:
    servicer = Servicer()
    servicer.errors[2] = ZeroDivisionError("boom")
    async with serving(servicer) as port, Client(port) as client:
        await client.link.wait_up(10)
        client.link.send(an_open(2))
        client.link.send(an_open(3))
        await until(lambda: len(client.events) == 2)
        failure = client.events[0]
        assert isinstance(failure, Failure)
        assert (failure.session_id, failure.reason, failure.session_closed) == (2, "INTERNAL", True)
        assert Close(2) in servicer.handlers[0].commands
        assert client.events[1] == TargetOpened(3)
    assert "boom" in caplog.text


async def test_defect_in_a_callback_of_the_client_is_logged_and_the_link_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(Servicer()) as port, Client(port) as client:
        await client.link.wait_up(10)
        seen: list[int] = []

        def fail_once(event: Any) -> None:
            seen.append(event.session_id)
            if len(seen) == 1:
                raise ZeroDivisionError("callback")

        client.link.on_event = fail_once
        client.link.send(an_open(1))
        client.link.send(an_open(2))
        await until(lambda: len(seen) == 2)
        assert client.link.is_up
    assert "callback" in caplog.text


async def test_malformed_command_names_its_session_and_leaves_the_others_alone() -> None:
    async with serving(Servicer()) as port, raw_stream(port) as stream:
        await stream.write(hello_frame())
        assert (await stream.read()).HasField("welcome")
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


async def test_malformed_event_reaches_its_session_as_a_failure() -> None:
    async with serving(servicer := Servicer()) as port, Client(port) as client:
        await client.link.wait_up(10)
        await until(lambda: servicer.handlers)
        writer = servicer.handlers[0].writer
        writer.send(Verdict(4, 0, ()))
        writer.send(TargetOpened(5))
        await until(lambda: len(client.events) == 2)
        failure = client.events[0]
        assert isinstance(failure, Failure)
        assert (failure.session_id, failure.reason) == (4, "PEER_UNAVAILABLE"), "it may be had of another peer"
        assert "malformed" in failure.message
        assert failure.metadata["field"] == "verdict token_ids"
        assert client.events[1] == TargetOpened(5)


@pytest.mark.parametrize(
    ("frames", "kind", "words"),
    [
        ([pb.VerifyRequest(commands=[pb.TargetCommand()])], ProtocolMismatch, "hello"),
        ([pb.VerifyRequest()], ProtocolMismatch, "hello"),
        ([hello_frame(), hello_frame()], ProtocolMismatch, "second hello"),
        ([pb.VerifyRequest(hello=codec.encode_hello(Hello("x", protocol_version=9)))], ProtocolMismatch, "= 9"),
        (
            [pb.VerifyRequest(hello=codec.encode_hello(Hello("x", Fingerprint(tokenizer="other"))))],
            VocabularyMismatch,
            "tokenizer = 'abc'",
        ),
        (
            [pb.VerifyRequest(hello=codec.encode_hello(Hello("x", Fingerprint(vocab_size=65))))],
            VocabularyMismatch,
            "vocab_size = 64",
        ),
        (
            [
                hello_frame(),
                pb.VerifyRequest(
                    commands=[
                        pb.TargetCommand(open=pb.TargetOpen(spec={"token_ids": [1 << 31] * (MAX_FRAME_BYTES // 4)}))
                    ]
                ),
            ],
            InvalidInput,
            f"at most {MAX_FRAME_BYTES}",
        ),
        (
            [hello_frame(), pb.VerifyRequest(commands=[pb.TargetCommand()] * (MAX_FRAME_MESSAGES + 1))],
            InvalidInput,
            f"frame messages = {MAX_FRAME_MESSAGES + 1}: must be at most {MAX_FRAME_MESSAGES}",
        ),
        (
            [
                hello_frame(),
                pb.VerifyRequest(
                    commands=[pb.TargetCommand(open=pb.TargetOpen(spec={"token_ids": [1 << 31] * MAX_FRAME_BYTES}))]
                ),
            ],
            InvalidInput,
            "larger than max",
        ),
    ],
)
async def test_malformed_frame_ends_the_link_with_a_typed_status(
    frames: list[pb.VerifyRequest], kind: type[PacelineError], words: str
) -> None:
    async with serving(servicer := Servicer()) as port:
        async with raw_stream(port) as stream:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                for frame in frames:
                    await stream.write(frame)
                while await stream.read() is not grpc.aio.EOF:
                    pass
            error = from_rpc_error(caught.value)
            assert type(error) is kind
            assert words in error.message
        await until(lambda: servicer.ended == 1)
        assert all(handler.closed_count == 1 for handler in servicer.handlers)
        async with Client(port) as client:
            await client.link.wait_up(10)
            client.link.send(an_open(1))
            await until(lambda: client.events)


async def test_a_frame_of_too_many_events_costs_the_peer_its_link_and_nobody_else_a_moment() -> None:
    async with serving(servicer := Servicer()) as port, Client(port, reconnect_min_ms=1) as client:
        await client.link.wait_up(10)
        await until(lambda: servicer.handlers)
        servicer.handlers[0].writer.show_life(pb.VerifyResponse(events=[pb.TargetEvent()] * 170_000))
        await until(lambda: client.downs)
        assert client.downs[0].metadata["cause"] == "INVALID_INPUT"
        assert f"frame messages = 170000: must be at most {MAX_FRAME_MESSAGES}" in client.downs[0].message
        assert client.events == []
        await client.link.wait_up(10)
        client.link.send(an_open(client.link.next_session_id()))
        await until(lambda: client.events)


async def test_a_frame_of_as_many_events_as_may_be_is_delivered_in_one_go() -> None:
    async with serving(Servicer()) as port, Client(port) as client:
        await client.link.wait_up(10)
        for session in range(1, MAX_FRAME_MESSAGES + 1):
            client.link.send(a_round(session), urgent=True)
        await until(lambda: len(client.events) == MAX_FRAME_MESSAGES)
        assert client.frames_sent == 1


async def test_no_hello_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_TIMEOUT_S", 0.05)
    async with serving(servicer := Servicer()) as port, raw_stream(port) as stream:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert "no hello" in from_rpc_error(caught.value).message
        assert not servicer.handlers


async def test_message_larger_than_a_frame_is_refused_by_the_sender() -> None:
    async with serving(Servicer()) as port, Client(port) as client:
        await client.link.wait_up(10)
        with pytest.raises(InvalidInput, match=r"bytes of TargetOpen = \d+: must be at most 1048576"):
            client.link.send(an_open(1, tokens=400_000))
        client.link.send(an_open(2))
        await until(lambda: client.events == [TargetOpened(2)])


async def test_backlog_larger_than_a_frame_is_split() -> None:
    async with serving(servicer := Servicer()) as port, Client(port) as client:
        await client.link.wait_up(10)
        for session in range(1, 11):
            client.link.send(an_open(session, tokens=100_000))
        await until(lambda: len(client.events) == 10)
        assert client.frames_sent == 4
        assert [command.session_id for command in servicer.handlers[0].commands] == list(range(1, 11))


async def test_client_that_closes_its_link_frees_the_handler_once() -> None:
    async with serving(servicer := Servicer()) as port:
        async with Client(port) as client:
            await client.link.wait_up(10)
            await until(lambda: servicer.handlers)
        await until(lambda: servicer.ended == 1)
        assert servicer.handlers[0].closed_count == 1
        assert len(client.downs) == 1
        with pytest.raises(PeerUnavailable, match="target at 127"):
            client.link.send(an_open(1))


async def test_cancelled_call_and_half_close_free_the_handler_once() -> None:
    async with serving(servicer := Servicer()) as port:
        for links, end in enumerate(("cancel", "half-close"), 1):
            async with raw_stream(port) as stream:
                await stream.write(hello_frame())
                await stream.read()
                await until(partial(_has_links, servicer, links))
                if end == "cancel":
                    stream.cancel()
                else:
                    await stream.done_writing()
                    assert await stream.read() is grpc.aio.EOF
                await until(lambda: servicer.handlers[-1].closed_count)
        await until(lambda: servicer.ended == 2)
        assert [handler.closed_count for handler in servicer.handlers] == [1, 1]


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


async def test_dropped_link_is_down_at_once_and_comes_back() -> None:
    async with serving(servicer := Servicer()) as port, Client(port) as client:
        await client.link.wait_up(10)
        await until(lambda: servicer.handlers)  # opened behind the welcome; a drop before that leaves none to close
        error = PeerUnavailable("silent")
        client.link.drop(error)
        assert client.downs == [error]
        assert not client.link.is_up
        await client.link.wait_up(10)
        assert (len(client.ups), len(client.downs)) == (2, 1)
        await until(lambda: servicer.handlers[0].closed_count == 1)


class WelcomesTwice(pb_grpc.TargetServiceServicer):
    """Breaks the rules on its first link, and keeps them ever after."""

    def __init__(self) -> None:
        self.links = 0

    async def Verify(self, request_iterator: Any, context: Any) -> None:
        self.links += 1
        await context.read()
        for _ in range(2 if self.links == 1 else 1):
            await context.write(pb.VerifyResponse(welcome=codec.encode_welcome(WELCOME)))
        await asyncio.Event().wait()


async def test_a_peer_that_breaks_the_rules_is_lost_and_not_refused() -> None:
    async with serving(servicer := WelcomesTwice()) as port, Client(port) as client:
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
    hello: Hello, kind: type[PacelineError], caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(servicer := Servicer()) as port,
        Client(port, hello, reconnect_min_ms=1, reconnect_max_ms=5) as client,
    ):
        with pytest.raises(kind):
            await client.link.wait_up(10)
        await until(lambda: servicer.ended >= 3)
        assert type(client.link.last_error) is kind
        assert not client.ups
        assert not client.downs
    assert sum("no link" in record.message for record in caplog.records) == 1


async def test_empty_fingerprint_fits_any_vocabulary() -> None:
    ngram = Servicer(Welcome("draft-1", Fingerprint(model="ngram"), 4096, 64))
    async with serving(ngram) as port, Client(port, HELLO) as client:
        assert (await client.link.wait_up(10)).fingerprint.model == "ngram"


async def test_black_hole_is_not_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_TIMEOUT_S", 0.1)
    over = asyncio.Event()

    async def swallow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()
        await writer.wait_closed()

    hole = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = hole.sockets[0].getsockname()[1]
    async with Client(port, reconnect_min_ms=1, reconnect_max_ms=5) as client:
        await until(lambda: client.link.last_error)
        with pytest.raises(PeerUnavailable, match=rf"target at 127.0.0.1:{port}.*did not answer"):
            await client.link.wait_up(0.05)
    over.set()
    hole.close()
    await hole.wait_closed()


@pytest.mark.parametrize(("number", "keepalive"), [(signal.SIGKILL, Keepalive()), (signal.SIGSTOP, FAST)])
async def test_killed_or_stopped_process_brings_the_link_down_once(
    number: signal.Signals, keepalive: Keepalive
) -> None:
    server = _process("server_process")
    try:
        port = int(await asyncio.to_thread(_first_line, server))
        async with Client(port, keepalive=keepalive) as client:
            await client.link.wait_up(20)
            client.link.send(an_open(1))
            await until(lambda: client.events == [TargetOpened(1)])
            server.send_signal(number)
            await until(lambda: client.downs)
            assert isinstance(client.downs[0], PeerUnavailable)
            assert len(client.downs) == 1
            with pytest.raises(PeerUnavailable):
                client.link.send(a_round(1))
    finally:
        _end(server)


async def test_killed_client_frees_the_handler_once() -> None:
    async with serving(servicer := Servicer()) as port:
        client = _process("client_process", str(port))
        try:
            assert await asyncio.to_thread(_first_line, client) == "up"
            await until(lambda: servicer.handlers)
            client.kill()
            await until(lambda: servicer.handlers[0].closed_count)
            await until(lambda: servicer.ended)
            assert servicer.handlers[0].closed_count == 1
        finally:
            _end(client)


async def test_error_metadata_of_an_absent_peer_names_it() -> None:
    async with Client(1, reconnect_max_ms=20) as client:
        await until(lambda: client.link.last_error)
        with pytest.raises(PeerUnavailable) as caught:
            await client.link.wait_up(0.01)
        assert caught.value.metadata == {"peer": "target", "address": "127.0.0.1:1"}
        assert caught.value.retry_safe


def test_failure_survives_the_way_through_the_wire() -> None:
    error = UnknownSession("session 3 is not open", metadata={"session": "3"})
    failure = codec.failure_of(3, error, session_closed=True)
    event = codec.decode_target_event(codec.encode_target_event(failure))
    assert event == failure
    assert isinstance(event, Failure)
    again = codec.error_of(event)
    assert (type(again), again.message, again.metadata) == (UnknownSession, error.message, error.metadata)


def test_nothing_connects_when_a_channel_is_made() -> None:
    link = TargetLink(PeerSettings(address="127.0.0.1:1"), HELLO)
    assert not link.is_up
    assert link.welcome is None


def _has_links(servicer: Servicer, links: int) -> bool:
    return len(servicer.handlers) == links


def _process(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", f"tests.rpc.{name}", *arguments], cwd=ROOT, stdout=subprocess.PIPE)


def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


async def test_a_client_that_reads_nothing_loses_its_link_and_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_WAITING_BYTES", 1 << 20)
    async with serving(servicer := Servicer()) as port, raw_stream(port) as stream:
        await stream.write(hello_frame())
        await stream.read()
        writer = servicer.handlers[0].writer
        # Large, since gRPC takes some megabytes in before it lets a writer wait.
        event = codec.failure_of(1, PeerUnavailable("x" * 200_000), session_closed=False)
        async with asyncio.timeout(20):
            while not servicer.handlers[0].closed_count:
                writer.send(event)
                await asyncio.sleep(0)
        assert writer._waiting_bytes <= (1 << 20) + MAX_FRAME_BYTES, "nothing was gathered beyond the bound"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
        told = from_rpc_error(caught.value)
        assert isinstance(told, PeerUnavailable), "once it reads it is told why"
        assert "bytes unread" in told.message
