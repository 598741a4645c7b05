"""Frames between a service and its grammar workers: a JSON object and some bytes, with their lengths before them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTHS = struct.Struct("<II")
Frame = tuple[dict[str, Any], bytes]


def encode_frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """A frame as bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class FrameReader:
    """Puts frames together from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, piece: bytes) -> Iterator[Frame]:
        """The frames that a piece completes."""
        self._data += piece
        while len(self._data) >= _LENGTHS.size:
            text, payload = _LENGTHS.unpack_from(self._data)
            end = _LENGTHS.size + text + payload
            if len(self._data) < end:
                return
            header = json.loads(self._data[_LENGTHS.size : _LENGTHS.size + text])
            body = bytes(self._data[end - payload : end])
            del self._data[:end]
            yield header, body
