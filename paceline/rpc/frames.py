"""Frames of a link, as both ends treat them: written as messages come, checked, and read beside the writer."""

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
"""Tag and length of one message in its frame, from above."""
MAX_WAITING_FEATURES = 64 << 20
"""Bytes of features that wait on one link, at most: half a second at 1 Gbit/s. Drafters do without what is beyond."""
MAX_WAITING_BYTES = 256 << 20
"""Bytes of other messages that wait on one link, at most: opens of 1,024 sessions of 80,000 tokens. A reader that
leaves as much unread has hung or is flooded; its link ends, and its sessions are opened anew where there is time."""
Message = Any  # a generated protobuf message


class InSession(Protocol):
    """Every message of a link but the handshake names its session."""

    @property
    def session_id(self) -> int:
        """The session that the message belongs to."""


M = TypeVar("M", bound=InSession)


class FrameWriter(Generic[M]):
    """Gathers messages into frames; one write is in flight at a time, and none waits to be filled.

    Belongs to one event loop; `send` never blocks. Urgent messages leave before
    the others, but never before an earlier message of their own session. Features
    leave behind all others, `MAX_FEATURE_BYTES` of them with a frame at most,
    so that what comes meanwhile waits for little. Those that a slow reader keeps
    waiting are dropped, and those of a session that is closed. Other messages are
    never dropped: where too many wait, the link ends (`overflow`).
    """

    def __init__(self, encode: Callable[[M], Message], frame: Callable[[list[Message]], Message]) -> None:
        self._encode = encode
        self._frame = frame
        self._urgent: deque[tuple[Message, int]] = deque()
        self._others: deque[tuple[Message, int, int]] = deque()
        self._waiting_sessions = Counter[int]()
        self._waiting_bytes = 0
        self._overflown = asyncio.Event()
        self._features: deque[tuple[Message, int, int]] = deque()
        self._feature_bytes = 0
        self._is_dropping = False
        self._sign: Message | None = None
        self._filled = asyncio.Event()
        self._closed = False
        self.frames_sent = 0
        """Frames with messages that were written, or tried to be."""

    def send(self, message: M, urgent: bool = False) -> None:
        """Queue a message; dropped in silence once the writer is closed (the link's end is told elsewhere).

        Raises:
            InvalidInput: the message alone is larger than a frame.
        """
        if self._closed:
            return
        encoded = self._encode(message)
        size = encoded.ByteSize() + MESSAGE_OVERHEAD_BYTES
        if size > MAX_FRAME_BYTES:
            raise InvalidInput.of(f"bytes of {type(message).__name__}", size, f"at most {MAX_FRAME_BYTES}")
        session = message.session_id
        if isinstance(message, Features):
            self._send_features(encoded, size, session)
            return
        if isinstance(message, Close) and self._features:
            self._features = deque(each for each in self._features if each[2] != session)
            self._feature_bytes = sum(size for _, size, _ in self._features)
        self._waiting_bytes += size
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._overflown.set()
            self.close()
            return
        if urgent and session not in self._waiting_sessions:
            self._urgent.append((encoded, size))
        else:
            self._others.append((encoded, size, session))
            self._waiting_sessions[session] += 1
        self._filled.set()

    def _send_features(self, encoded: Message, size: int, session: int) -> None:
        fits = self._feature_bytes + size <= MAX_WAITING_FEATURES
        if fits:
            self._features.append((encoded, size, session))
            self._feature_bytes += size
            self._filled.set()
        elif not self._is_dropping:
            logger.warning("features are dropped, their reader is slow: waiting_bytes=%d", self._feature_bytes)
        self._is_dropping = not fits

    def show_life(self, sign: Message) -> None:
        """Have this frame written behind what is pending; it takes the place of one that still waits."""
        if not self._closed:
            self._sign = sign
            self._filled.set()

    async def run(self, write: Callable[[Message], Awaitable[None]]) -> NoReturn:
        """Write whatever is pending, all at once, until cancelled or until `write` raises."""
        while True:
            await self._filled.wait()
            messages = self._take()
            sign, self._sign = self._sign, None
            if messages:
                self.frames_sent += 1  # before: the peer's answer may be here when the write returns
                await write(self._frame(messages))
            if sign is not None:
                await write(sign)

    async def overflow(self) -> NoReturn:
        """Run this beside `run`: it ends the link when too much waits, also while a write does.

        Raises:
            PeerUnavailable: the reader has left more than `MAX_WAITING_BYTES` unread.
        """
        await self._overflown.wait()
        raise PeerUnavailable(f"the reader of the link left more than {MAX_WAITING_BYTES} bytes unread")

    def close(self) -> None:
        """Forget what is pending and what will be sent."""
        self._closed = True
        self._urgent.clear()
        self._others.clear()
        self._features.clear()
        self._waiting_sessions.clear()
        self._filled.clear()

    def _take(self) -> list[Message]:
        """What fits into one frame; at least one message if any is pending, as each fits alone."""
        taken: list[Message] = []
        room = MAX_FRAME_BYTES

        def fits(size: int) -> bool:
            return size <= room and len(taken) < MAX_FRAME_MESSAGES

        while self._urgent and fits(self._urgent[0][1]):
            message, size = self._urgent.popleft()
            taken.append(message)
            room -= size
            self._waiting_bytes -= size
        while not self._urgent and self._others and fits(self._others[0][1]):
            message, size, session = self._others.popleft()
            taken.append(message)
            room -= size
            self._waiting_bytes -= size
            self._waiting_sessions[session] -= 1
            if not self._waiting_sessions[session]:
                del self._waiting_sessions[session]
        if not self._urgent and not self._others:
            self._take_features(taken, room)
            if not self._features:
                self._filled.clear()
        return taken

    def _take_features(self, taken: list[Message], room: int) -> None:
        while self._features and self._features[0][1] <= room and len(taken) < MAX_FRAME_MESSAGES:
            message, size, _ = self._features.popleft()
            taken.append(message)
            room = min(room, MAX_FEATURE_BYTES) - size
            self._feature_bytes -= size


def check_frame(frame: Message, messages: int) -> None:
    """Raise `InvalidInput` for a frame beyond the size, or the number of messages, that both ends allow."""
    size = frame.ByteSize()
    require(size <= MAX_FRAME_BYTES, "frame bytes", size, f"at most {MAX_FRAME_BYTES}")
    require(messages <= MAX_FRAME_MESSAGES, "frame messages", messages, f"at most {MAX_FRAME_MESSAGES}")


async def first_to_end(*bodies: Any, at_end: Callable[[], None] = lambda: None) -> bool:
    """Run bodies side by side until one ends; the others are cancelled, its exception is raised.

    If several end at once the first one's exception counts: a reader knows why
    a stream ended, a writer only that it did. `at_end` is called exactly once,
    before anything else is waited for.

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
