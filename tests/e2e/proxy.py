"""A TCP proxy that can be cut, or swallow bytes, or delay them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

Address = tuple[str, int]
Result = TypeVar("Result")


class Proxy:
    """Runs in a thread of its own; a context manager."""

    def __init__(self, upstream: Address) -> None:
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._opened: set[asyncio.StreamWriter] = set()
        self._swallowing: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._accept, "127.0.0.1", 0))
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
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            self._writers.add(sink)
            task = asyncio.ensure_future(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if sink not in self._swallowing:
                    sink.write(data)
                    await sink.drain()
        if sink not in self._swallowing:
            sink.close()
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
