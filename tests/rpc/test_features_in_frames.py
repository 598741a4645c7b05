"""Features leave behind everything else on their link, in small portions."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.protocol import codec
from paceline.protocol.features import MAX_FEATURE_BYTES, Features, FeatureType
from paceline.protocol.session import Close
from paceline.protocol.target import TargetOpened, Verdict
from paceline.rpc.frames import MAX_WAITING_FEATURES, FrameWriter
from paceline.v1 import target_service_pb2 as pb


def features(session: int, position: int, size: int = 2000) -> Features:
    return Features(session, position, FeatureType.FLOAT16, (1, 1, size // 2), bytes(size))


def writer() -> FrameWriter[Any]:
    return FrameWriter(codec.encode_target_event, lambda events: pb.VerifyResponse(events=events))


def frames(writing: FrameWriter[Any]) -> list[list[Any]]:
    """What would be written now, frame by frame."""
    found = []
    while messages := writing._take():
        found.append([codec.decode_target_event(message) for message in messages])
    return found


def kinds(frame: list[Any]) -> list[tuple[str, int]]:
    return [(type(each).__name__, each.session_id) for each in frame]


def test_no_verdict_waits_for_features_even_of_its_own_session() -> None:
    writing = writer()
    writing.send(features(1, 0))
    writing.send(TargetOpened(1))
    writing.send(Verdict(2, 5, (1,)), urgent=True)
    (frame,) = frames(writing)
    assert kinds(frame) == [("Verdict", 2), ("TargetOpened", 1), ("Features", 1)]


def test_a_frame_has_a_bounded_part_of_them_in_order() -> None:
    writing = writer()
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
    writing = writer()
    for position in range(MAX_WAITING_FEATURES // MAX_FEATURE_BYTES + 3):
        writing.send(features(1, position, MAX_FEATURE_BYTES))
    kept = [each.first_position for frame in frames(writing) for each in frame]
    assert kept == [*range(len(kept))]
    assert MAX_WAITING_FEATURES // MAX_FEATURE_BYTES - 1 <= len(kept) <= MAX_WAITING_FEATURES // MAX_FEATURE_BYTES
    assert caplog.text.count("features are dropped, their reader is slow") == 1
    writing.send(features(1, 0))
    assert frames(writing), "there is room again"
