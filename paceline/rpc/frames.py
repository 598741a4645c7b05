"""Frames of a link, for both ends: gathered from messages and written, checked, and read beside the writer."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from paceline.protocol.errors import InvalidInput, PeerUnavailable, require
from paceline.protocol.features import MAX_FEATURE_BYTES, Features
from paceline.protocol.handshake import MAX_FRAME_BYTES, MAX_FRAME_MESSAGES
from paceline.protocol.session import Close

logger = logging.getLogger(__name__)

MESSAGE_OVERHEAD_BYTES = 8
"""Upper bound of the tag and the length of one message in its frame."""
MAX_WAITING_FEATURES = 64 << 20
"""Most bytes of features that wait on one link: half a second at 1 Gbit/s. Further features are dropped."""
MAX_WAITING_BYTES = 256 << 20
"""Most bytes of other messages that wait on one link: opens of 1,024 sessions of 80,000 tokens. A reader that leaves
more unread hangs or is flooded; its link ends, and its sessions are opened again if they have time left."""
Message = Any  # a generated protobuf message


class InSession(Protocol):
    """Every message of a link but the handshake names its session."""

    @property
    def session_id(self) -> int:
        """The session that the message belongs to."""


M = TypeVar("M", bound=InSession)


class FrameWriter(Generic[M]):
    """Gathers messages into frames. One write is in flight at a time, and no frame waits to be filled.

    Belongs to one event loop; `send` never blocks. Urgent messages leave before
    the others, but never before an earlier message of their own session. Features
    leave after all others, at most `MAX_FEATURE_BYTES` with a frame, so that
    later messages wait for little. Features are dropped if the reader is slow or
    their session is closed. Other messages are never dropped: if too many wait,
    the link ends (`overflow`).
    """

    def __init__(self, encode: Callable[[M], Message], frame: Callable[[list[Message]], Message]) -> None:
        self._encode = encode
        self._frame = frame
        self._urgent: deque[tuple[Message, int]] = deque()
        self._others: deque[tuple[Message, int, int]] = deque()
        self._waiting_sessions = Counter[int]()
        self._waiting_bytes = 0
        self._overflow_event = asyncio.Event()
        self._features: deque[tuple[Message, int, int]] = deque()
        self._feature_bytes = 0
        self._is_dropping = False
        self._sign: Message | None = None
        self._pending_event = asyncio.Event()
        self._closed = False
        self.frames_sent = 0
        """Frames with messages whose write has begun."""

    def send(self, message: M, urgent: bool = False) -> None:
        """Queue a message. A closed writer drops it silently, since the link's end is reported elsewhere.

        Raises:
            InvalidInput: the message alone is larger than a frame.
        """
        if self._closed:
            return
        frame_message = self._encode(message)
        size = frame_message.ByteSize() + MESSAGE_OVERHEAD_BYTES
        if size > MAX_FRAME_BYTES:
            raise InvalidInput.of(f"bytes of {type(message).__name__}", size, f"at most {MAX_FRAME_BYTES}")
        session = message.session_id
        if isinstance(message, Features):
            self._send_features(frame_message, size, session)
            return
        if isinstance(message, Close) and self._features:
            self._features = deque(each for each in self._features if each[2] != session)
            self._feature_bytes = sum(size for _, size, _ in self._features)
        self._waiting_bytes += size
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._overflow_event.set()
            self.close()
            return
        if urgent and session not in self._waiting_sessions:
            self._urgent.append((frame_message, size))
        else:
            self._others.append((frame_message, size, session))
            self._waiting_sessions[session] += 1
        self._pending_event.set()

    def _send_features(self, frame_message: Message, size: int, session: int) -> None:
        fits = self._feature_bytes + size <= MAX_WAITING_FEATURES
        if fits:
            self._features.append((frame_message, size, session))
            self._feature_bytes += size
            self._pending_event.set()
        elif not self._is_dropping:
            logger.warning("features are dropped, their reader is slow: waiting_bytes=%d", self._feature_bytes)
        self._is_dropping = not fits

    def show_life(self, sign: Message) -> None:
        """Write this frame after the pending messages, in place of an earlier sign that still waits."""
        if not self._closed:
            self._sign = sign
            self._pending_event.set()

    async def run(self, write: Callable[[Message], Awaitable[None]]) -> NoReturn:
        """Write all pending messages at once, again and again, until cancelled or until `write` raises."""
        while True:
            await self._pending_event.wait()
            messages = self._take()
            sign, self._sign = self._sign, None
            if messages:
                self.frames_sent += 1  # before the write: the peer's answer may arrive before it returns
                await write(self._frame(messages))
            if sign is not None:
                await write(sign)

    async def overflow(self) -> NoReturn:
        """Run this beside `run`: it ends the link when too much waits, even while a write is in flight.

        Raises:
            PeerUnavailable: the reader has left more than `MAX_WAITING_BYTES` unread.
        """
        await self._overflow_event.wait()
        raise PeerUnavailable(f"the reader of the link left more than {MAX_WAITING_BYTES} bytes unread")

    def close(self) -> None:
        """Drop pending messages and all later ones."""
        self._closed = True
        self._urgent.clear()
        self._others.clear()
        self._features.clear()
        self._waiting_sessions.clear()
        self._pending_event.clear()

    def _take(self) -> list[Message]:
        """The pending messages that fit into one frame, at least one if any is pending, since each fits alone."""
        batch: list[Message] = []
        room = MAX_FRAME_BYTES

        def fits(size: int) -> bool:
            return size <= room and len(batch) < MAX_FRAME_MESSAGES

        while self._urgent and fits(self._urgent[0][1]):
            message, size = self._urgent.popleft()
            batch.append(message)
            room -= size
            self._waiting_bytes -= size
        while not self._urgent and self._others and fits(self._others[0][1]):
            message, size, session = self._others.popleft()
            batch.append(message)
            room -= size
            self._waiting_bytes -= size
            self._waiting_sessions[session] -= 1
            if not self._waiting_sessions[session]:
                del self._waiting_sessions[session]
        if not self._urgent and not self._others:
            self._take_features(batch, room)
            if not self._features:
                self._pending_event.clear()
        return batch

    def _take_features(self, batch: list[Message], room: int) -> None:
        while self._features and self._features[0][1] <= room and len(batch) < MAX_FRAME_MESSAGES:
            message, size, _ = self._features.popleft()
            batch.append(message)
            room = min(room, MAX_FEATURE_BYTES) - size
            self._feature_bytes -= size


def check_frame(frame: Message, messages: int) -> None:
    """Raise `InvalidInput` for a frame with more bytes or messages than both ends allow."""
    size = frame.ByteSize()
    require(size <= MAX_FRAME_BYTES, "frame bytes", size, f"at most {MAX_FRAME_BYTES}")
    require(messages <= MAX_FRAME_MESSAGES, "frame messages", messages, f"at most {MAX_FRAME_MESSAGES}")


async def first_to_end(*bodies: Any, at_end: Callable[[], None] = lambda: None) -> bool:
    """Run bodies side by side until one ends; then cancel the others, and raise its exception.

    If several end at once, the exception of the first in order counts: a reader
    knows why a stream ended, a writer only that it did. `at_end` is called
    exactly once, before the cancelled bodies are awaited.

    Returns:
        Whether the first body has ended by itself.
    """
    tasks = [asyncio.ensure_future(body) for body in bodies]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
        return tasks[0] in done
    finally:
        try:
            at_end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
