"""A TCP proxy that can be cut, swallow bytes, delay them, and be struck at a frame of its own choosing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tests.chaos.framing import ChunkSplitter, Direction, Frame, Splitter

Address = tuple[str, int]
Result = TypeVar("Result")
MakeSplitter = Callable[[Direction], Splitter]


class Wire:
    """One direction of one connection, as a tap writes to it."""

    def __init__(self, sink: asyncio.StreamWriter, cut: Callable[[], None]) -> None:
        self._sink = sink
        self.cut = cut
        """Close the connection at once, both ways."""

    async def write(self, data: bytes) -> None:
        self._sink.write(data)
        await self._sink.drain()


class Tap(Protocol):
    """What sees every frame of a connection."""

    async def pass_on(self, way: Direction, frame: Frame, wire: Wire) -> None:
        """Write the frame to the wire, or something else, now or later."""


class PassOn:
    """The tap that changes nothing."""

    async def pass_on(self, way: Direction, frame: Frame, wire: Wire) -> None:
        """Write the frame."""
        await wire.write(frame.raw)


class Proxy:
    """Runs in a thread of its own; a context manager. `tap` makes what sees the frames of a new connection,
    `splitter` what cuts a direction's bytes into frames; it listens at `listen`, port 0: a free one."""

    def __init__(
        self,
        upstream: Address,
        tap: Callable[[], Tap] = PassOn,
        splitter: MakeSplitter = lambda way: ChunkSplitter(),
        listen: Address = ("127.0.0.1", 0),
    ) -> None:
        self._upstream = upstream
        self._listen = listen
        self._make_tap = tap
        self._make_splitter = splitter
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._opened: set[asyncio.StreamWriter] = set()
        self._swallowing: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._accept, *self._listen))
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Close every connection now; new ones are served."""
        self._call(self._cut())

    def swallow_current(self) -> None:
        """Keep today's connections open and carry nothing on them; new ones are served."""
        self._call(self._swallow())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.close()
            return
        self._opened |= {writer, up_writer}
        tap = self._make_tap()

        def cut() -> None:
            for each in (writer, up_writer):
                each.transport.abort()

        for way, source, sink in ((Direction.UP, reader, up_writer), (Direction.DOWN, up_reader, writer)):
            self._writers.add(sink)
            task = asyncio.ensure_future(self._pump(way, source, sink, tap, Wire(sink, cut)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, way: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter, tap: Tap, wire: Wire
    ) -> None:
        splitter = self._make_splitter(way)
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                for frame in splitter.feed(data):
                    if sink not in self._swallowing:
                        await tap.pass_on(way, frame, wire)
        if sink not in self._swallowing:
            sink.close()
            self._opened.discard(sink)
        self._writers.discard(sink)

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _swallow(self) -> None:
        self._swallowing |= self._writers

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._opened:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._opened), return_exceptions=True)

    def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=20)
