"""Links without sockets: frames lie in lanes until they are delivered, and a link may break at any of them.

They stand where gRPC does: everything above, from frames and handshake to reconnects, is the services' own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
from grpc.aio import Metadata

from paceline.protocol.handshake import Hello
from paceline.rpc.link_kinds import DRAFT, TARGET
from paceline.rpc.peer_link import DraftLink, TargetLink
from paceline.runtime.config import PeerSettings

END = grpc.aio.EOF
"""Delivered behind the last frame of a link that broke."""
Serve = Callable[[Any], Coroutine[Any, Any, None]]
"""Serves one call of a link, as `Verify` and `Draft` of the services do."""


class Lane:
    """One direction of a link: frames arrive in order, when they are delivered.

    Args:
        capacity: frames that may travel before a writer waits.
        on_end: called when its end is delivered.

    Attributes:
        ended: whether its end was delivered.
        is_broken: whether nothing leaves any more.
    """

    def __init__(self, capacity: int, on_end: Callable[[], None]) -> None:
        self.ended = False
        self.is_broken = False
        self.travelling: deque[Any] = deque()
        self._capacity = capacity
        self._on_end = on_end
        self._arrived: deque[Any] = deque()
        self._news, self._moved = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        """Frames to deliver."""
        return len(self.travelling)

    async def write(self, frame: Any) -> None:
        """Send a frame; waits while more than `capacity` travel."""
        self._put(frame)
        while len(self.travelling) > self._capacity and not self.is_broken:
            self._moved.clear()
            await self._moved.wait()

    async def read(self) -> Any:
        """The next frame that has arrived, or `END`."""
        while not self._arrived:
            self._news.clear()
            await self._news.wait()
        return self._arrived.popleft() if self._arrived[0] is not END else END

    def deliver(self) -> None:
        """The first frame arrives."""
        frame = self.travelling.popleft()
        self._arrived.append(frame)
        self._news.set()
        self._moved.set()
        if frame is END:
            self.ended = True
            self._on_end()
        else:
            self.on_arrival(frame)

    def end(self, *, keep: bool) -> None:
        """Nothing more leaves. `keep`: what has left still arrives; else it is lost."""
        if self.is_broken:
            return
        if not keep:
            self.travelling.clear()
        self._put(END)
        self.is_broken = True
        self._moved.set()

    def on_leave(self) -> None:
        """Called when a frame, or the end, has left."""

    def on_arrival(self, frame: Any) -> None:
        """Called when a frame has been delivered."""

    def _put(self, frame: Any) -> None:
        if not self.is_broken:
            self.travelling.append(frame)
            self.on_leave()


class LaneCall:
    """One link to a service, as long as it stands: what gRPC's call is to its ends.

    Args:
        serve: the service's side.
        up, down: make the lanes to the service and back, of what is to be called at each one's end.
    """

    def __init__(
        self,
        serve: Serve,
        loop: asyncio.AbstractEventLoop,
        up: Callable[[Callable[[], None]], Lane],
        down: Callable[[Callable[[], None]], Lane],
    ) -> None:
        self.up, self.down = up(self._end_service), down(lambda: None)
        self._server = loop.create_task(serve(ServiceEnd(self)))
        self._server.add_done_callback(self._served)
        self.defect: BaseException | None = None

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """Both directions."""
        return self.up, self.down

    @property
    def is_over(self) -> bool:
        """Whether both ends know of its end."""
        return self.up.ended and self.down.ended and self._server.done()

    def end(self, *, keep_up: bool, keep_down: bool) -> None:
        """The link breaks; each end hears of it when the end of its lane is delivered."""
        self.up.end(keep=keep_up)
        self.down.end(keep=keep_down)

    def _end_service(self) -> None:
        self._server.cancel()

    def _served(self, server: asyncio.Task[None]) -> None:
        self.end(keep_up=True, keep_down=True)
        if not server.cancelled():
            self.defect = server.exception()


class ServiceEnd:
    """Stands for a `grpc.aio.ServicerContext`."""

    def __init__(self, call: LaneCall) -> None:
        self._call = call

    def peer(self) -> str:
        """Name who calls."""
        return "coordinator"

    def done(self) -> bool:
        """Say whether the call has ended."""
        return self._call.up.ended

    def cancelled(self) -> bool:
        """Say whether the call has ended."""
        return self._call.up.ended

    async def read(self) -> Any:
        """Return the next frame, or `END`."""
        return await self._call.up.read()

    async def write(self, frame: Any) -> None:
        """Send a frame."""
        if self._call.up.ended:
            raise asyncio.InvalidStateError("the call has ended")
        await self._call.down.write(frame)

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        """Fail: no service ends a link whose peer is honest."""
        raise AssertionError(f"a service ends its link: {code} {details}")


class CallEnd:
    """Stands for a bidirectional gRPC call."""

    def __init__(self, call: LaneCall) -> None:
        self._call = call

    async def read(self) -> Any:
        """Return the next frame, or raise as gRPC does where the link broke."""
        frame = await self._call.down.read()
        if frame is END:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "Socket closed")
        return frame

    async def write(self, frame: Any) -> None:
        """Send a frame."""
        if self._call.down.ended:
            raise asyncio.InvalidStateError("the call has ended")
        await self._call.up.write(frame)

    def cancel(self) -> None:
        """End the call; what is under way is lost."""
        self._call.end(keep_up=False, keep_down=False)


class ChannelEnd:
    """Stands for a channel and for the stub on it."""

    def __init__(self, connect: Callable[[], LaneCall]) -> None:
        self._connect = connect
        self._calls: list[CallEnd] = []

    def open_call(self) -> CallEnd:
        """Open a link."""
        self._calls.append(CallEnd(self._connect()))
        return self._calls[-1]

    Verify = Draft = open_call

    async def close(self) -> None:
        """End its calls."""
        for call in self._calls:
            call.cancel()


Connect = Callable[[str], ChannelEnd]
"""Opens a channel to the service of an address."""


class LaneTargetLink(TargetLink):
    """A link to a target over lanes."""

    kind = replace(TARGET, stub=lambda channel: channel)

    def __init__(self, address: str, hello: Hello, connect: Connect) -> None:
        super().__init__(PeerSettings(address=address), hello)
        self._connect = connect

    def open_channel(self) -> Any:
        """As `PeerLink`."""
        return self._connect(self.address)


class LaneDraftLink(DraftLink):
    """A link to a draft service over lanes."""

    kind = replace(DRAFT, stub=lambda channel: channel)

    def __init__(self, address: str, hello: Hello, connect: Connect) -> None:
        super().__init__(PeerSettings(address=address), hello)
        self._connect = connect

    def open_channel(self) -> Any:
        """As `PeerLink`."""
        return self._connect(self.address)


class Processor:
    """One core of a process, on which its work is done piece by piece, in the order in which it comes.

    Attributes:
        busy_s: time that its work has taken.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.busy_s = 0.0
        self._loop = loop
        self._free_at = 0.0

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        """Do so much work behind what is to do already, then call back."""
        self.busy_s += seconds
        self._free_at = max(self._free_at, self._loop.time()) + seconds
        self._loop.call_at(self._free_at, then)


class TimedLane(Lane):
    """A lane whose frames travel for a time, and are dealt with one after the other by whoever gets them.

    Args:
        delay_s: time that a frame travels; called for each.
        receiver: the processor of the process that reads.
        frame_s: what a frame costs it, seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        delay_s: Callable[[], float],
        receiver: Processor,
        frame_s: Callable[[Any], float],
        on_end: Callable[[], None],
        capacity: int = 1 << 20,
    ) -> None:
        super().__init__(capacity, on_end)
        self._loop = loop
        self._delay_s = delay_s
        self._receiver = receiver
        self._frame_s = frame_s
        self._arrives_at = 0.0

    def on_leave(self) -> None:
        """Have the frame arrive in time, behind those before it."""
        self._arrives_at = max(self._arrives_at, self._loop.time() + self._delay_s())
        cost_s = 0.0 if self.travelling[-1] is END else self._frame_s(self.travelling[-1])
        self._loop.call_at(self._arrives_at, self._receiver.work, cost_s, self._deliver_next)

    def _deliver_next(self) -> None:
        if self.travelling:  # else it was lost with its link
            self.deliver()
