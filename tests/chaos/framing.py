"""Bytes of a connection as frames: HTTP/2's with the gRPC messages that end in them, or whatever was read at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What an HTTP/2 client sends before its first frame."""
HEAD_BYTES = 9
"""Length (3), type (1), flags (1), stream (4)."""
LENGTH_BYTES = 3
TYPE_AT = 3
DATA = 0
PREFIX_BYTES = 5
"""Before each gRPC message: whether it is compressed (1), its length (4)."""


class Direction(Enum):
    """The direction that bytes take through a proxy."""

    UP = "to the server"
    DOWN = "to the client"


@dataclass(frozen=True)
class Frame:
    """What is passed on at once. `messages`: gRPC messages whose last byte is in it, or, of other protocols, `raw`
    itself; `whole`: it holds these and nothing else, so that it can be sent again."""

    raw: bytes
    messages: tuple[bytes, ...] = ()
    whole: bool = False

    @property
    def is_chunk(self) -> bool:
        return self.messages == (self.raw,)

    def told(self, change: Callable[[bytes], bytes]) -> Frame:
        """The frame with other gRPC messages; itself, where it holds parts of some."""
        if not self.whole:
            return self
        changed = tuple(change(message) for message in self.messages)
        data = b"".join(b"\0" + len(each).to_bytes(PREFIX_BYTES - 1) + each for each in changed)
        return Frame(len(data).to_bytes(LENGTH_BYTES) + self.raw[TYPE_AT:HEAD_BYTES] + data, changed, whole=True)


class Splitter(Protocol):
    """Makes frames of one direction's bytes; their joined `raw` are those bytes."""

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes in; returns the frames that they complete."""


class ChunkSplitter:
    """Of a protocol that isn't read: every read is a frame."""

    def feed(self, data: bytes) -> list[Frame]:
        return [Frame(data, (data,), whole=True)]


@dataclass
class GrpcSplitter:
    """Of HTTP/2 without TLS; `client` says whether the bytes are the client's, which begin with a preface."""

    client: bool
    _bytes: bytearray = field(default_factory=bytearray)
    _pending: dict[int, bytearray] = field(default_factory=dict)

    def feed(self, data: bytes) -> list[Frame]:
        self._bytes += data
        frames = []
        while (size := self._next_size()) is not None and len(self._bytes) >= size:
            raw = bytes(self._bytes[:size])
            del self._bytes[:size]
            frames.append(Frame(raw) if self.client and raw == PREFACE else self._frame(raw))
            self.client = self.client and raw != PREFACE
        return frames

    def _next_size(self) -> int | None:
        if self.client:
            return len(PREFACE)
        if len(self._bytes) < HEAD_BYTES:
            return None
        return HEAD_BYTES + int.from_bytes(self._bytes[:LENGTH_BYTES])

    def _frame(self, raw: bytes) -> Frame:
        if raw[TYPE_AT] != DATA:
            return Frame(raw)
        stream = int.from_bytes(raw[5:HEAD_BYTES]) & 0x7FFF_FFFF
        pending = self._pending.setdefault(stream, bytearray())
        fresh = not pending
        pending += raw[HEAD_BYTES:]
        messages = []
        while (end := _message_end(pending)) is not None:
            messages.append(bytes(pending[PREFIX_BYTES:end]))
            del pending[:end]
        whole = fresh and not pending and bool(messages)
        if not pending:
            del self._pending[stream]
        return Frame(raw, tuple(messages), whole)


def _message_end(pending: bytearray) -> int | None:
    if len(pending) < PREFIX_BYTES:
        return None
    end = PREFIX_BYTES + int.from_bytes(pending[1:PREFIX_BYTES])
    return end if len(pending) >= end else None
