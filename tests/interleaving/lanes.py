"""Links without sockets: frames lie in lanes until somebody delivers them, and a link may break at any of them.

It stands where gRPC does: everything above, from frames and handshake to reconnects, is the product's own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from grpc.aio import Metadata

from paceline.v1 import types_pb2 as pb
from tests.interleaving.stepping import SteppedLoop

END = grpc.aio.EOF
"""Delivered behind the last frame of a link that broke."""
FAIR = ("OVERLOADED", "PEER_UNAVAILABLE")
"""Reasons for which a service may refuse what an honest coordinator sends."""
UNMODELLED = ("opened", "shadow", "features")
Serve = Callable[[Any], Coroutine[Any, Any, None]]


ProposedBefore = dict[tuple[int, int], bytes]
"""What each round proposed, by the request's seed and its base length, where each round draws anew."""


class Heard:
    """What has arrived over one link: how much of each kind, and what honest peers don't say.

    A session that its service has ended may get messages that were on their way: those alone are refused. Under
    rejection and block acceptance a round may have been drawn, so it is sent again with the same proposal only.
    """

    def __init__(
        self, counts: Counter[str], complained: list[str], drawn: ProposedBefore, told: Callable[[str, Any], None]
    ) -> None:
        self._counts = counts
        self._complained = complained
        self._drawn = drawn
        self._told = told
        self._ended: set[int] = set()
        self._seeds: dict[int, int] = {}
        """Of the sessions whose rounds are to stay as they are."""

    def command(self, frame: Any) -> None:
        """Take note of what a service hears."""
        for message in frame.commands:
            kind = message.WhichOneof("command")
            said = getattr(message, kind)
            self._told(kind, said)
            self._counts[kind] += 1
            if kind == "open":
                self._counts["opened in mid-text"] += len(said.spec.token_ids) > said.spec.prompt_length
                if said.spec.acceptance != pb.ACCEPTANCE_COUPLED:
                    self._seeds[said.session_id] = said.spec.noise.seed
            elif kind == "round":
                self._counts["leases"] += said.lease > 0
                self._take_round(said)
            elif kind == "verifying":
                self._counts["proposals told by their tokens"] += said.HasField("proposal")

    def event(self, frame: Any) -> None:
        """Take note of what the coordinator hears."""
        for message in frame.events:
            kind = message.WhichOneof("event")
            said = getattr(message, kind)
            self._told(kind, said)
            self._counts[kind] += 1
            if kind == "verdict":
                self._counts["self-started rounds"] += said.HasField("self_started")
            elif kind == "failure":
                self._take_failure(said)

    def _take_round(self, round_: Any) -> None:
        seed, proposed = self._seeds.get(round_.session_id), round_.proposal.SerializeToString(deterministic=True)
        if seed is not None and self._drawn.setdefault((seed, round_.base_length), proposed) != proposed:
            self._complained.append(f"round {round_.base_length} is sent again with another proposal")

    def _take_failure(self, failure: Any) -> None:
        if failure.reason not in FAIR and failure.session_id not in self._ended:
            self._complained.append(f"refused: {failure.reason} {failure.message}")
        if failure.session_closed:
            self._ended.add(failure.session_id)


class Lane:
    """One direction of a link: frames arrive in order, when they are delivered.

    Attributes:
        name: `c>t0`, say.
        since: the loop's count of calls when its first frame left, or came to be the first.
    """

    def __init__(
        self, name: str, loop: SteppedLoop, capacity: int, tap: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self.name = name
        self.since = 0
        self.ended = False
        """Whether its end was delivered."""
        self._loop = loop
        self._capacity = capacity
        self._tap = tap
        self._on_end = on_end
        self.is_broken = False
        """Whether nothing leaves any more."""
        self._travelling: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._news, self._moved = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        """Frames to deliver."""
        return len(self._travelling)

    @property
    def is_aside(self) -> bool:
        """Whether its first frame has nothing that the model knows."""
        first = self._travelling[0]
        if first is END:
            return False
        if hasattr(first, "commands"):
            return bool(first.HasField("hello"))
        return all(message.WhichOneof("event") in UNMODELLED for message in first.events)

    async def write(self, frame: Any) -> None:
        """Send a frame; waits while more than `capacity` travel."""
        self._put(frame)
        while len(self._travelling) > self._capacity and not self.is_broken:
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
        frame = self._travelling.popleft()
        self._arrived.append(frame)
        self._news.set()
        self._moved.set()
        self.since = self._loop.calls
        if frame is END:
            self.ended = True
            self._on_end()
        else:
            self._tap(frame)

    def end(self, *, keep: bool) -> None:
        """Nothing more leaves. `keep`: what has left still arrives; else it is lost."""
        if self.is_broken:
            return
        if not keep:
            self._travelling.clear()
        self._put(END)
        self.is_broken = True
        self._moved.set()

    def _put(self, frame: Any) -> None:
        if self.is_broken:
            return
        if not self._travelling:
            self.since = self._loop.calls
        self._travelling.append(frame)


class LaneCall:
    """One link to a service, as long as it stands: what gRPC's call is to its ends."""

    def __init__(self, to: str, serve: Serve, loop: SteppedLoop, capacity: int, heard: Heard) -> None:
        self.to = to
        self.up = Lane(f"c>{to}", loop, capacity, heard.command, self._end_service)
        self.down = Lane(f"{to}>c", loop, capacity, heard.event, lambda: None)
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

    def __init__(self, wire: LaneCall) -> None:
        self._wire = wire

    def peer(self) -> str:
        return "coordinator"

    def done(self) -> bool:
        return self._wire.up.ended

    def cancelled(self) -> bool:
        return self._wire.up.ended

    async def read(self) -> Any:
        return await self._wire.up.read()

    async def write(self, frame: Any) -> None:
        if self._wire.up.ended:
            raise asyncio.InvalidStateError("the call has ended")
        await self._wire.down.write(frame)

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        raise AssertionError(f"a service ends its link: {code} {details}")


class CallEnd:
    """Stands for a bidirectional gRPC call."""

    def __init__(self, wire: LaneCall) -> None:
        self._wire = wire

    async def read(self) -> Any:
        frame = await self._wire.down.read()
        if frame is END:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "Socket closed")
        return frame

    async def write(self, frame: Any) -> None:
        if self._wire.down.ended:
            raise asyncio.InvalidStateError("the call has ended")
        await self._wire.up.write(frame)

    def cancel(self) -> None:
        self._wire.end(keep_up=False, keep_down=False)


class ChannelEnd:
    """Stands for a channel and for the stub on it."""

    def __init__(self, connect: Callable[[], LaneCall]) -> None:
        self._connect = connect
        self._calls: list[CallEnd] = []

    def Verify(self) -> CallEnd:
        self._calls.append(CallEnd(self._connect()))
        return self._calls[-1]

    Draft = Verify

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
