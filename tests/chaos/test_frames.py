"""The proxy's eyes and hands: frames of bytes, states of frames, what a blow leaves of one."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import types_pb2
from tests.chaos.blows import Aim, Blow, Moment
from tests.chaos.framing import PREFACE, Direction, Frame, GrpcSplitter
from tests.chaos.lies import COST_LIES, DRAFT_LIES
from tests.chaos.states import State, TargetLinkStates, draft_link_states, generation_states
from tests.chaos.trigger import Armed, Trigger, proxy_before

MESSAGES = [b"", b"a", b"b" * 300, b"c" * 20_000]
WAIT_S = 5.0


def data_frame(payload: bytes, stream: int = 1) -> bytes:
    return len(payload).to_bytes(3) + b"\0\0" + stream.to_bytes(4) + payload


def grpc_message(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4) + message


def a_round(lease: int = 0) -> bytes:
    round_ = target_pb.Round(session_id=3, base_length=9, committed=[1], lease=lease)
    command = target_pb.TargetCommand(round=round_)
    return target_pb.VerifyRequest(commands=[command]).SerializeToString()


def a_verdict() -> bytes:
    event = target_pb.TargetEvent(verdict=target_pb.Verdict(session_id=3, base_length=9, token_ids=[7]))
    return target_pb.VerifyResponse(events=[event]).SerializeToString()


def a_proposal() -> bytes:
    proposal = types_pb2.Proposal(proposal_id=1, token_ids=[5, 6], draft_probabilities=[0.5, 0.5])
    outcome = types_pb2.Outcome(base_length=9, node=-1, next_token=4)
    drafted = draft_pb.DraftedProposal(session_id=3, outcome=outcome, proposal=proposal)
    events = [draft_pb.DraftEvent(proposal=drafted)]
    shadow = draft_pb.Shadow(session_id=3, first_position=20, ranks=[1], probabilities=[0.5])
    return draft_pb.DraftResponse(events=[*events, draft_pb.DraftEvent(shadow=shadow)]).SerializeToString()


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_frames_are_the_bytes_and_end_with_their_messages(step: int) -> None:
    """Whatever arrives at once; a message may lie in several frames, and a frame hold several messages."""
    stream = b"".join(grpc_message(each) for each in MESSAGES)
    frames = [
        data_frame(stream[:3]),
        data_frame(stream[3:9_000]),
        data_frame(stream[9_000:]),
        b"\0\0\4\6\0\0\0\0\0ping",
    ]
    sent = PREFACE + b"".join(frames)
    splitter, split = GrpcSplitter(client=True), list[Frame]()
    for start in range(0, len(sent), step):
        split += splitter.feed(sent[start : start + step])
    assert [frame.raw for frame in split] == [PREFACE, *frames]
    assert [message for frame in split for message in frame.messages] == MESSAGES
    assert not any(frame.whole for frame in split)


def test_a_whole_frame_can_tell_something_else() -> None:
    (frame,) = GrpcSplitter(client=False).feed(data_frame(grpc_message(b"a") + grpc_message(b"b"), stream=5))
    assert frame.whole
    (told,) = GrpcSplitter(client=False).feed(frame.told(lambda message: message * 3).raw)
    assert told.messages == (b"aaa", b"bbb")
    assert told.raw[3:9] == frame.raw[3:9]


def test_states_are_read_off_messages() -> None:
    target, down = TargetLinkStates(), Direction.DOWN
    assert target(Direction.UP, a_round()) == {State.SEND}
    assert target(down, a_verdict()) == {State.VERDICT}
    target(Direction.UP, a_round(lease=4))
    assert target(down, a_verdict()) == {State.VERDICT, State.RUN}
    target(Direction.UP, a_round())
    assert target(down, a_verdict()) == {State.VERDICT}, "the run has ended"
    assert draft_link_states(down, a_proposal()) == {State.PROPOSAL}
    commit = draft_pb.DraftRequest(commands=[draft_pb.DraftCommand(commit=draft_pb.Commit(session_id=3))])
    assert draft_link_states(Direction.UP, commit.SerializeToString()) == {State.COMMIT}
    finished = generation_pb.GenerateResponse(finished=generation_pb.GenerationFinished())
    assert generation_states(down, finished.SerializeToString()) == {State.STOP}
    for recognise in (target, draft_link_states, generation_states):
        assert recognise(down, b"\xff\xff") == set()


@pytest.mark.parametrize("lie", [*DRAFT_LIES.values(), COST_LIES["draft"]])
def test_a_lie_is_a_message_of_its_kind_that_says_something_else(
    lie: Callable[[bytes, random.Random], bytes],
) -> None:
    told = lie(a_proposal(), random.Random(3))
    assert told != a_proposal()
    assert len(draft_pb.DraftResponse.FromString(told).events) == 2
    assert lie(b"\xff\xff", random.Random(3)) == b"\xff\xff"


@contextlib.contextmanager
def answering() -> Iterator[socket.socket]:
    """A listener that answers whatever comes first on a connection with `SENT`, and ends it."""

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            connection.recv(1 << 16)
            connection.sendall(SENT)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                answer(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield listener
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


SENT = data_frame(grpc_message(a_verdict()))
BLOWS: list[tuple[Aim, Callable[[bytes], bool]]] = [
    (Aim(Blow.CUT, Moment.BEFORE), lambda got: got == b""),
    (Aim(Blow.CUT, Moment.DURING), lambda got: len(got) < len(SENT)),
    (Aim(Blow.TRUNCATE, byte=4), lambda got: len(got) < len(SENT)),
    (Aim(Blow.DUPLICATE), lambda got: got == 2 * SENT),
    (Aim(Blow.CORRUPT, byte=0), lambda got: got[0] != SENT[0] and got[1:] == SENT[1:]),
    (Aim(Blow.CORRUPT, byte=1), lambda got: got[:3] == SENT[:3] and got[3] != SENT[3] and got[4:] == SENT[4:]),
    (Aim(Blow.DELAY, Moment.DURING, seconds=0.01), lambda got: got == SENT),
    (Aim(Blow.HOLD, Moment.AFTER, seconds=0.01), lambda got: got == SENT),
    (Aim(Blow.SLOW, seconds=0.01), lambda got: got == SENT),
]


@contextlib.contextmanager
def struck(aim: Aim, state: State) -> Iterator[tuple[Armed, socket.socket]]:
    """A connection that a blow is armed for, behind its preface."""
    trigger, armed = Trigger(), Armed(frozenset({"it"}), state, 0, lambda label: aim)
    trigger.arm(armed)
    with answering() as upstream, proxy_before("target", "it", upstream.getsockname(), trigger) as proxy:
        host, port = proxy.address.split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as client:
            client.sendall(PREFACE)
            yield armed, client


@pytest.mark.parametrize(("aim", "fits"), BLOWS, ids=[f"{aim.blow.value}-{aim.byte}" for aim, _ in BLOWS])
def test_a_blow_does_to_a_frame_what_it_says(aim: Aim, fits: Callable[[bytes], bool]) -> None:
    with struck(aim, State.VERDICT) as (armed, client):
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := client.recv(1 << 16):
                answer += data
        assert armed.over.wait(WAIT_S)
    assert armed.label == "it"
    assert fits(answer)


@pytest.mark.parametrize("error", [RuntimeError("broken"), FileNotFoundError("no such command")])
def test_a_blow_that_cannot_be_dealt_is_told(error: Exception) -> None:
    def fails() -> None:
        raise error

    with struck(Aim(Blow.CALL, call=fails), State.ANY) as (armed, _):
        assert armed.over.wait(WAIT_S)
    assert armed.failure is error
