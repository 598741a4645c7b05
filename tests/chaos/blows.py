"""What a proxy can do to a connection at one of its frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tests.chaos.framing import TYPE_AT, Direction, Frame
from tests.chaos.proxy import Wire

SETTINGS = 4
"""The type of a frame that is an error on any stream but 0, where no messages are."""
HUGE = 0x80
"""In the first byte of a length: 8 MiB more, beyond what a peer takes."""
SLOW_PAUSE_S = 0.03
"""Before each frame of a slow connection: several rounds' time, and too short for any timeout."""


class Moment(Enum):
    """When a blow falls: before the frame is sent, between its halves, or behind it."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


class Blow(Enum):
    """What is done; the value is its name in plans and reports."""

    CUT = "cut"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    HOLD = "hold"
    SLOW = "slow"
    LIE = "lie"
    CALL = "call"
    """What somebody else does to a process, at this frame."""


@dataclass(frozen=True)
class Aim:
    """A blow and its particulars: how long it lasts, the `byte` that chooses what is corrupted and where a frame is
    cut off, what CALL runs in a thread, and what LIE makes of each message to the client."""

    blow: Blow
    moment: Moment = Moment.BEFORE
    seconds: float = 0.0
    byte: int = 0
    call: Callable[[], None] = lambda: None
    lie: Callable[[bytes], bytes] = bytes


@dataclass
class Lasting:
    """What lasts beyond a frame: whether nothing passes now, until when all is slow, and until when all are lies."""

    open: asyncio.Event = field(default_factory=asyncio.Event)
    slow_until: float = 0.0
    lies_until: float = 0.0
    lie: Callable[[bytes], bytes] = bytes

    def __post_init__(self) -> None:
        self.open.set()

    async def admit(self) -> None:
        await self.open.wait()
        if time.monotonic() < self.slow_until:
            await asyncio.sleep(SLOW_PAUSE_S)

    def told(self, way: Direction, frame: Frame) -> Frame:
        lies = way is Direction.DOWN and time.monotonic() < self.lies_until
        return frame.told(self.lie) if lies else frame


async def strike(aim: Aim, frame: Frame, wire: Wire, connection: Lasting) -> None:
    """Do to a frame, and to its connection, what is aimed at it; whatever of it is to pass has been written."""
    if aim.blow in _WHOLE:
        await _WHOLE[aim.blow](aim, frame, wire)
        return
    before = {Moment.BEFORE: 0, Moment.DURING: len(frame.raw) // 2, Moment.AFTER: len(frame.raw)}[aim.moment]
    await wire.write(frame.raw[:before])
    if not await _BETWEEN[aim.blow](aim, wire, connection):
        return
    await wire.write(frame.raw[before:])


async def _truncate(aim: Aim, frame: Frame, wire: Wire) -> None:
    await wire.write(frame.raw[: 1 + aim.byte % (len(frame.raw) - 1)])
    wire.cut()


async def _duplicate(aim: Aim, frame: Frame, wire: Wire) -> None:
    await wire.write(frame.raw + frame.raw)


async def _corrupt(aim: Aim, frame: Frame, wire: Wire) -> None:
    """Any bit under TLS; without, into a head that no HTTP/2 goes on with: other damage would go unnoticed."""
    damaged = bytearray(frame.raw)
    if frame.is_chunk:
        damaged[aim.byte // 8 % len(damaged)] ^= 1 << aim.byte % 8
    elif aim.byte % 2:
        damaged[TYPE_AT] = SETTINGS
    else:
        damaged[0] ^= HUGE
    await wire.write(bytes(damaged))


async def _cut(aim: Aim, wire: Wire, connection: Lasting) -> bool:
    wire.cut()
    return False


async def _delay(aim: Aim, wire: Wire, connection: Lasting) -> bool:
    await asyncio.sleep(aim.seconds)
    return True


async def _hold(aim: Aim, wire: Wire, connection: Lasting) -> bool:
    connection.open.clear()
    await asyncio.sleep(aim.seconds)
    connection.open.set()
    return True


async def _slow(aim: Aim, wire: Wire, connection: Lasting) -> bool:
    connection.slow_until = time.monotonic() + aim.seconds
    return True


async def _lie(aim: Aim, wire: Wire, connection: Lasting) -> bool:
    connection.lie, connection.lies_until = aim.lie, time.monotonic() + aim.seconds
    return True


async def _call(aim: Aim, wire: Wire, connection: Lasting) -> bool:
    await asyncio.to_thread(aim.call)
    return True


_WHOLE: Mapping[Blow, Callable[[Aim, Frame, Wire], Awaitable[None]]] = {
    Blow.TRUNCATE: _truncate,
    Blow.DUPLICATE: _duplicate,
    Blow.CORRUPT: _corrupt,
}
_BETWEEN: Mapping[Blow, Callable[[Aim, Wire, Lasting], Awaitable[bool]]] = {
    Blow.CUT: _cut,
    Blow.DELAY: _delay,
    Blow.HOLD: _hold,
    Blow.SLOW: _slow,
    Blow.LIE: _lie,
    Blow.CALL: _call,
}
"""Each says whether the rest of the frame still passes."""
