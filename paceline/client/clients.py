"""`Client` and `AsyncClient`: the same calls, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any

import grpc

from paceline.client.shared import (
    CLOSED_MESSAGE,
    ClientBase,
    Generation,
    Progress,
    first_sample,
    models_of,
    other_samples,
    request_of,
)
from paceline.protocol import codec
from paceline.protocol.errors import Cancelled, PacelineError
from paceline.protocol.generation import (
    GenerateEvent,
    GenerateRequest,
    ModelDescription,
    Started,
)
from paceline.rpc.channel import open_channel, open_sync_channel
from paceline.rpc.statuses import from_rpc_error, is_of_the_call


class Client(ClientBase):
    """Synchronous client; a context manager.

    Args:
        address: `host:port` of a coordinator, or `PeerSettings` for TLS.
        timeout_s: deadline of each call; None: no deadline.
        resume_wait_s: how long a broken stream may go without a token before the
            error is raised; 0 switches resuming off.
        overload_wait_s: how long a request that finds no room is tried again, no sooner than the
            refusal says; 0: the refusal is raised.
        wait_ready: seconds that the first call waits for a coordinator that is still
            loading, isn't reachable yet or has no link to its target; 0: it doesn't.
        api_key: sent with each call, for a coordinator that needs one. Without TLS the network can read it.
    """

    _open = staticmethod(open_sync_channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel. Running streams end with CANCELLED, and so do later calls."""
        self._close_event.set()
        self._channel.close()

    def stream(self, request: GenerateRequest | None = None, **fields: Any) -> Iterator[GenerateEvent]:
        """Yield `Started`, then `Tokens`, then `Finished`; closing the iterator cancels the request.

        Args:
            request: the whole request, or its fields as keywords.

        Raises:
            PacelineError: the service's error, with its type.
        """
        yield from self._events(self._progress(request_of(request, fields)))

    def generate(self, request: GenerateRequest | None = None, **fields: Any) -> Generation:
        """Run one generation to its end. Raises as `stream` does."""
        progress = self._progress(request_of(request, fields))
        for _ in self._events(progress):
            if progress.end_event:
                break
        return progress.generation()

    def generate_samples(self, n: int, request: GenerateRequest | None = None, **fields: Any) -> list[Generation]:
        """Run n samples of one prompt and seed, all at once; sample 0 is what `generate` returns.

        The coordinator's first message has the seed in force, so the other samples start after it.

        Raises:
            InvalidInput: n, or a request that names a sample or resumes one.
            PacelineError: as `generate`; the first sample that fails.
        """
        first = self._progress(first_sample(n, request_of(request, fields)))
        others: Iterable[Generation] = ()
        with ThreadPoolExecutor(n) as pool:
            for event in self._events(first):
                if isinstance(event, Started):
                    others = pool.map(self.generate, other_samples(n, first.request, event.seed))
                elif first.end_event:
                    break
            return [first.generation(), *others]

    def describe_models(self) -> tuple[ModelDescription, ...]:
        """The models that the coordinator serves."""
        self._await_ready()
        return self._describe(self._timeout_s)

    def _describe(self, timeout_s: float | None) -> tuple[ModelDescription, ...]:
        try:
            return models_of(self._ask(timeout_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def _await_ready(self) -> None:
        while not self._readiness.is_ready:
            try:
                self._readiness.note(self._describe(self._readiness.next_timeout_s()))
            except PacelineError as error:
                self._readiness.note(error)
            if not self._readiness.is_ready:
                time.sleep(self._readiness.next_pause_s())

    def _events(self, progress: Progress) -> Iterator[GenerateEvent]:
        with progress.begin_trace():
            self._await_ready()
            while True:
                call = self._begin(progress)
                try:
                    for response in call:
                        if (event := progress.take(codec.decode_generate_event(response))) is not None:
                            yield event
                    return
                except grpc.RpcError as error:
                    pauses = progress.retry_pauses(from_rpc_error(error), self._patience)
                    if pauses is None:
                        return
                finally:
                    call.cancel()
                for pause_s in pauses:
                    time.sleep(pause_s)


class AsyncClient(ClientBase):
    """`Client` for asyncio; use it in one event loop."""

    _open = staticmethod(open_channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """As `Client.close`."""
        self._close_event.set()
        await self._channel.close()

    async def stream(
        self, request: GenerateRequest | None = None, **fields: Any
    ) -> AsyncGenerator[GenerateEvent, None]:
        """As `Client.stream`."""
        # Closing the outer iterator must cancel the call now, not when the inner one is collected.
        async with aclosing(self._events(self._progress(request_of(request, fields)))) as events:
            async for event in events:
                yield event

    async def generate(self, request: GenerateRequest | None = None, **fields: Any) -> Generation:
        """As `Client.generate`."""
        progress = self._progress(request_of(request, fields))
        async with aclosing(self._events(progress)) as events:
            async for _ in events:
                if progress.end_event:
                    break
        return progress.generation()

    async def generate_samples(
        self, n: int, request: GenerateRequest | None = None, **fields: Any
    ) -> list[Generation]:
        """As `Client.generate_samples`."""
        first = self._progress(first_sample(n, request_of(request, fields)))
        others: list[asyncio.Task[Generation]] = []
        try:
            async with aclosing(self._events(first)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        samples = other_samples(n, first.request, event.seed)
                        others = [asyncio.create_task(self.generate(each)) for each in samples]
                    elif first.end_event:
                        break
            return [first.generation(), *await asyncio.gather(*others)]
        finally:
            for other in others:
                other.cancel()

    async def describe_models(self) -> tuple[ModelDescription, ...]:
        """As `Client.describe_models`."""
        await self._await_ready()
        return await self._describe(self._timeout_s)

    async def _describe(self, timeout_s: float | None) -> tuple[ModelDescription, ...]:
        try:
            with _closing_as_error():
                return models_of(await self._ask(timeout_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def _await_ready(self) -> None:
        while not self._readiness.is_ready:
            try:
                self._readiness.note(await self._describe(self._readiness.next_timeout_s()))
            except PacelineError as error:
                self._readiness.note(error)
            if not self._readiness.is_ready:
                await asyncio.sleep(self._readiness.next_pause_s())

    async def _events(self, progress: Progress) -> AsyncGenerator[GenerateEvent, None]:
        with progress.begin_trace():
            await self._await_ready()
            while True:
                call = self._begin(progress)
                try:
                    with _closing_as_error():
                        async for response in call:
                            if (event := progress.take(codec.decode_generate_event(response))) is not None:
                                yield event
                    return
                except grpc.RpcError as error:
                    pauses = progress.retry_pauses(from_rpc_error(error), self._patience)
                    if pauses is None:
                        return
                finally:
                    call.cancel()
                for pause_s in pauses:
                    await asyncio.sleep(pause_s)


@contextmanager
def _closing_as_error() -> Iterator[None]:
    """Raise `Cancelled`, as `Client` does, for a call whose channel was closed."""
    try:
        yield
    except asyncio.CancelledError as error:
        if not is_of_the_call():
            raise
        raise Cancelled(CLOSED_MESSAGE) from error
