"""Frames put together from pieces."""

from __future__ import annotations

import pytest

from paceline.grammars.wire import Frame, FrameReader, encode_frame

FRAMES: list[Frame] = [({"taken": 3, "reached": [True]}, b"\x00\xff" * 9), ({}, b""), ({"text": "ü\n"}, b"\0")]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_come_out_as_they_went_in_however_they_are_cut(size: int) -> None:
    stream, reader = b"".join(encode_frame(*frame) for frame in FRAMES), FrameReader()
    found = [frame for at in range(0, len(stream), size) for frame in reader.feed(stream[at : at + size])]
    assert found == FRAMES
