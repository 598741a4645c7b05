"""The frame writer by itself: order, size, one write in flight; features behind all else, in small portions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocol import codec
from paceline.protocol.codec import encode_target_command, session_id_of
from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.features import MAX_FEATURE_BYTES, Features, FeatureType
from paceline.protocol.handshake import MAX_FRAME_BYTES, MAX_FRAME_MESSAGES
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import Close, SessionSpec
from paceline.protocol.target import TargetCommand, TargetOpen, TargetOpened, Verdict
from paceline.rpc import frames as frames_module
from paceline.rpc.frames import MAX_WAITING_FEATURES, FrameWriter
from paceline.v1 import target_service_pb2 as pb
from tests.rpc.harness import a_round, an_open, background, until


def _writer() -> FrameWriter[TargetCommand]:
    return FrameWriter(encode_target_command, lambda commands: pb.VerifyRequest(commands=commands))


class Wire:
    """Takes frames when it is allowed to."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.go = asyncio.Event()

    async def write(self, frame: Any) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await self.go.wait()
        self.frames.append(frame)
        self.in_flight -= 1

    @property
    def sessions(self) -> list[list[int]]:
        return [[session_id_of(command) for command in frame.commands] for frame in self.frames]


async def test_one_write_is_in_flight_and_the_rest_gathers_behind_it() -> None:
    writer, wire = _writer(), Wire()
    async with background(writer.run(wire.write)):
        writer.send(a_round(1), urgent=True)
        await until(lambda: wire.in_flight)
        for session in range(2, 10):
            writer.send(a_round(session), urgent=True)
        wire.go.set()
        await until(lambda: len(wire.frames) == 2)
    assert wire.sessions == [[1], list(range(2, 10))]
    assert wire.most_in_flight == 1
    assert writer.frames_sent == 2


async def test_a_lone_message_leaves_at_once() -> None:
    writer, wire = _writer(), Wire()
    wire.go.set()
    async with background(writer.run(wire.write)):
        writer.send(Close(1))
        for _ in range(3):
            await asyncio.sleep(0)
        assert wire.sessions == [[1]]


async def test_urgent_messages_lead_but_never_overtake_their_own_session() -> None:
    writer, wire = _writer(), Wire()
    for session in (1, 2):
        writer.send(an_open(session))
    for session in (3, 1, 4):
        writer.send(a_round(session), urgent=True)
    wire.go.set()
    async with background(writer.run(wire.write)):
        await until(lambda: wire.frames)
    assert wire.sessions == [[3, 4, 1, 2, 1]]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from([1, 2_000, 300_000])), max_size=20))
def test_frames_are_bounded_whole_and_in_order(sent: list[tuple[int, bool, int]]) -> None:
    """Whatever is sent arrives once, each session in its order, in frames below the limit."""
    writer = _writer()
    for number, (session, urgent, tokens) in enumerate(sent, 1):
        # The seed carries the message's number.
        spec = SessionSpec((1,) * tokens, 1, SamplingParams(), NoiseKey(seed=number), Acceptance.COUPLED)
        writer.send(TargetOpen(session, spec), urgent=urgent)
    frames = _drained(writer, len(sent))
    assert all(len(frame.commands) > 0 and frame.ByteSize() <= MAX_FRAME_BYTES for frame in frames)
    arrived = [
        (command.open.session_id, command.open.spec.noise.seed) for frame in frames for command in frame.commands
    ]
    for session in range(1, 5):
        numbers = [number for owner, number in arrived if owner == session]
        assert numbers == [number for number, (owner, _, _) in enumerate(sent, 1) if owner == session]


def test_a_backlog_of_large_messages_leaves_in_full_frames() -> None:
    writer = _writer()
    for session in range(1, 11):
        writer.send(an_open(session, tokens=100_000))
    assert len(_drained(writer, 10)) == 4


@pytest.mark.parametrize("urgent", [False, True])
def test_a_backlog_of_tiny_messages_leaves_in_frames_that_the_reader_takes(urgent: bool) -> None:
    writer = _writer()
    for session in range(1, 2 * MAX_FRAME_MESSAGES + 3):
        writer.send(Close(session), urgent=urgent)
    frames = _drained(writer, 2 * MAX_FRAME_MESSAGES + 2)
    assert [len(frame.commands) for frame in frames] == [MAX_FRAME_MESSAGES, MAX_FRAME_MESSAGES, 2]
    arrived = [session_id_of(command) for frame in frames for command in frame.commands]
    assert arrived == [*range(1, 2 * MAX_FRAME_MESSAGES + 3)]


def _drained(writer: FrameWriter[TargetCommand], messages: int) -> list[Any]:
    frames: list[Any] = []

    async def write(frame: Any) -> None:
        frames.append(frame)

    async def drain() -> None:
        async with background(writer.run(write)):
            await until(lambda: sum(len(frame.commands) for frame in frames) == messages)

    asyncio.run(drain())
    return frames


async def test_a_reader_that_leaves_too_much_unread_loses_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a write waits for it; what was waiting is let go of."""
    monkeypatch.setattr(frames_module, "MAX_WAITING_BYTES", 10_000)
    writer, wire = _writer(), Wire()
    async with background(writer.run(wire.write)):
        overflow = asyncio.create_task(writer.overflow())
        for session in range(1, 2000):
            writer.send(a_round(session), urgent=session % 2 == 0)
            await asyncio.sleep(0)
            if overflow.done():
                break
        assert wire.in_flight == 1
        with pytest.raises(PeerUnavailable, match="left more than 10000 bytes unread"):
            await asyncio.wait_for(overflow, 10)
    assert not (writer._urgent or writer._others)


async def test_what_was_written_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_WAITING_BYTES", 10_000)
    writer, wire = _writer(), Wire()
    wire.go.set()
    async with background(writer.run(wire.write)):
        overflow = asyncio.create_task(writer.overflow())
        for session in range(1, 1000):
            writer.send(a_round(session), urgent=session % 2 == 0)
            if session % 50 == 0:
                await until(lambda: sum(map(len, wire.sessions)) == session)  # noqa: B023 - awaited here
        assert not overflow.done()
        overflow.cancel()


def features(session: int, position: int, size: int = 2000) -> Features:
    return Features(session, position, FeatureType.FLOAT16, (1, 1, size // 2), bytes(size))


def event_writer() -> FrameWriter[Any]:
    return FrameWriter(codec.encode_target_event, lambda events: pb.VerifyResponse(events=events))


def frames(writing: FrameWriter[Any]) -> list[list[Any]]:
    """What would be written now, frame by frame."""
    return [[codec.decode_target_event(each) for each in messages] for messages in iter(writing._take, [])]


def test_no_verdict_waits_for_features_even_of_its_own_session() -> None:
    writing = event_writer()
    writing.send(features(1, 0))
    writing.send(TargetOpened(1))
    writing.send(Verdict(2, 5, (1,)), urgent=True)
    (frame,) = frames(writing)
    assert [(type(each), each.session_id) for each in frame] == [(Verdict, 2), (TargetOpened, 1), (Features, 1)]


def test_a_frame_has_a_bounded_part_of_them_in_order() -> None:
    writing = event_writer()
    sent = [features(1, position, MAX_FEATURE_BYTES // 2) for position in range(5)] + [features(2, 9)]
    for each in sent:
        writing.send(each)
    written = frames(writing)
    assert [each for frame in written for each in frame] == sent
    assert max(sum(each.size for each in frame) for frame in written) <= MAX_FEATURE_BYTES
    largest = features(1, 0, MAX_FEATURE_BYTES)
    writing.send(largest)
    assert frames(writing) == [[largest]], "one of the largest size leaves, too"


def test_those_of_a_closed_session_and_those_beyond_the_limit_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    closing: FrameWriter[Any] = FrameWriter(codec.encode_draft_command, lambda made: pb.VerifyRequest(commands=made))
    for each in (features(1, 0), features(2, 0), Close(1)):
        closing.send(each)
    assert [codec.decode_draft_command(message) for message in closing._take()] == [Close(1), features(2, 0)]
    writing = event_writer()
    for position in range(MAX_WAITING_FEATURES // MAX_FEATURE_BYTES + 3):
        writing.send(features(1, position, MAX_FEATURE_BYTES))
    kept = [each.first_position for frame in frames(writing) for each in frame]
    assert kept == [*range(len(kept))]
    assert MAX_WAITING_FEATURES // MAX_FEATURE_BYTES - 1 <= len(kept) <= MAX_WAITING_FEATURES // MAX_FEATURE_BYTES
    assert caplog.text.count("features are dropped, their reader is slow") == 1
    writing.send(features(1, 0))
    assert frames(writing), "there is room again"
