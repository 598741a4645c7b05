"""The public Python client: `Client` and `AsyncClient`.

    with Client("127.0.0.1:50051") as client:
        for event in client.stream(prompt="Once upon a time", max_new_tokens=64):
            ...
        generation = client.generate(messages=[ChatMessage("user", "Hello")], seed=7)

A stream that breaks is resumed with the token ids that have arrived: they keep
their absolute positions and are never retokenised, so the joined text is what
an undisturbed stream would have been.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import grpc

from paceline.protocol import codec
from paceline.protocol.errors import PacelineError, PeerUnavailable, require
from paceline.protocol.generation import (
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    ModelDescription,
    Provenance,
    Started,
    Tokens,
)
from paceline.protocol.records import GenerationStats
from paceline.protocol.sampling import MAX_SAMPLES
from paceline.protocol.target import RowLogprobs
from paceline.rpc.channel import open_channel, open_sync_channel
from paceline.rpc.statuses import from_rpc_error
from paceline.runtime.config import COORDINATOR_PORT, LOCALHOST, PeerSettings
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = f"{LOCALHOST}:{COORDINATOR_PORT}"
RESUME_PAUSE_S = 0.1
RESUME_WAIT_S = 60.0


@dataclass(frozen=True)
class Generation:
    """A finished generation. After a resume, `stats` covers the last stream only."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    provenance: tuple[Provenance, ...]
    stats: GenerationStats
    logprobs: tuple[RowLogprobs, ...] = ()
    sample_index: int = 0


@dataclass
class _Progress:
    """What has arrived of one generation, and so how to go on with it."""

    request: GenerateRequest
    started: Started | None = None
    tokens: list[Tokens] = field(default_factory=list)
    broke_at: float | None = None
    """When the stream broke for the first time behind the last token, on the monotonic clock; None: it hasn't."""

    def next_request(self) -> GenerateRequest:
        """The request, or its continuation after what has arrived."""
        if self.started is None:
            return self.request
        arrived = tuple(token_id for tokens in self.tokens for token_id in tokens.token_ids)
        return replace(self.request, seed=self.started.seed, resume_token_ids=self.request.resume_token_ids + arrived)

    def news(self, event: GenerateEvent) -> bool:
        """Record an event; returns whether the caller should see it (a resume starts anew in silence)."""
        if isinstance(event, Started):
            first, self.started = self.started is None, self.started or event
            return first
        if isinstance(event, Tokens):
            self.broke_at = None
            self.tokens.append(event)
        return True

    def may_resume(self, error: PacelineError, wait_s: float) -> bool:
        """Whether a broken stream is worth another try; one that brings no token uses up the time for tries."""
        now = time.monotonic()
        if self.broke_at is None:
            self.broke_at = now
        return isinstance(error, PeerUnavailable) and now - self.broke_at < wait_s

    def finish(self, finished: Finished) -> Generation:
        """Join everything that arrived."""
        assert self.started is not None
        return Generation(
            text="".join(tokens.text for tokens in self.tokens) + finished.text,
            token_ids=tuple(token_id for tokens in self.tokens for token_id in tokens.token_ids),
            prompt_token_ids=self.started.prompt_token_ids,
            finish_reason=finished.reason,
            seed=self.started.seed,
            provenance=tuple(provenance for tokens in self.tokens for provenance in tokens.provenance),
            stats=finished.stats,
            logprobs=tuple(row for tokens in self.tokens for row in tokens.logprobs),
            sample_index=self.request.sample_index,
        )


def _other_samples(request: GenerateRequest, n: int, seed: int) -> list[GenerateRequest]:
    """Samples 1 to n - 1 of a request: the same prompt and seed, and noise of their own."""
    return [replace(request, seed=seed, sample_index=index) for index in range(1, n)]


def _check_samples(request: GenerateRequest, n: int) -> None:
    require(1 <= n <= MAX_SAMPLES, "n", n, f"in [1, {MAX_SAMPLES}]")
    require(request.sample_index == 0, "sample_index", request.sample_index, "0 with n, which counts from it")
    require(not request.resume_token_ids, "resume_token_ids", request.resume_token_ids, "left out with n")


class Client:
    """Synchronous client; a context manager.

    Args:
        address: `host:port` of a coordinator, or `PeerSettings` for TLS.
        timeout_s: deadline of each call; None: no deadline.
        resume_wait_s: how long a broken stream may stay without a token before the
            error is raised; 0 switches resuming off.
    """

    def __init__(
        self,
        address: str | PeerSettings = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        resume_wait_s: float = RESUME_WAIT_S,
    ) -> None:
        self._channel = open_sync_channel(_settings(address))
        self._stub = pb_grpc.GenerationServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._resume_wait_s = resume_wait_s

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; running streams end with CANCELLED."""
        self._channel.close()

    def stream(self, request: GenerateRequest | None = None, **fields: Any) -> Iterator[GenerateEvent]:
        """Yield `Started`, then `Tokens`, then `Finished`; closing the iterator cancels the request.

        Args:
            request: the whole request, or its fields as keywords.

        Raises:
            PacelineError: typed as the service sent it.
        """
        yield from self._events(_Progress(request or GenerateRequest(**fields)))

    def generate(self, request: GenerateRequest | None = None, **fields: Any) -> Generation:
        """Run one generation to its end. Raises as `stream` does."""
        progress = _Progress(request or GenerateRequest(**fields))
        for event in self._events(progress):
            if isinstance(event, Finished):
                return progress.finish(event)
        raise PeerUnavailable("the stream ended before the generation did")

    def generate_samples(self, n: int, request: GenerateRequest | None = None, **fields: Any) -> list[Generation]:
        """Run n samples of one prompt and seed, all at once; sample 0 is what `generate` returns.

        The seed in force is the coordinator's to tell: the other samples start behind its first message.

        Raises:
            InvalidInput: n, or a request that names a sample or resumes one.
            PacelineError: as `generate`; the first sample that fails.
        """
        request = request or GenerateRequest(**fields)
        _check_samples(request, n)
        first = _Progress(request)
        others: Iterable[Generation] = ()
        with ThreadPoolExecutor(n) as pool:
            for event in self._events(first):
                if isinstance(event, Started):
                    others = pool.map(self.generate, _other_samples(request, n, event.seed))
                elif isinstance(event, Finished):
                    return [first.finish(event), *others]
        raise PeerUnavailable("the stream ended before the generation did")

    def describe_models(self) -> tuple[ModelDescription, ...]:
        """What the coordinator serves."""
        try:
            response = self._stub.DescribeModels(pb.DescribeModelsRequest(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return tuple(codec.decode_model_description(model) for model in response.models)

    def _events(self, progress: _Progress) -> Iterator[GenerateEvent]:
        while True:
            call = self._stub.Generate(
                codec.encode_generate_request(progress.next_request()),
                timeout=self._timeout_s,
            )
            try:
                for response in call:
                    event = codec.decode_generate_event(response)
                    if progress.news(event):
                        yield event
                return
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                if not progress.may_resume(error, self._resume_wait_s):
                    raise error from rpc_error
            finally:
                call.cancel()
            time.sleep(RESUME_PAUSE_S)


class AsyncClient:
    """`Client` for asyncio; use it in one event loop."""

    def __init__(
        self,
        address: str | PeerSettings = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        resume_wait_s: float = RESUME_WAIT_S,
    ) -> None:
        self._channel = open_channel(_settings(address))
        self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._resume_wait_s = resume_wait_s

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; running streams end with CANCELLED."""
        await self._channel.close()

    async def stream(
        self, request: GenerateRequest | None = None, **fields: Any
    ) -> AsyncGenerator[GenerateEvent, None]:
        """As `Client.stream`."""
        # Closing the outer iterator must cancel the call now, not when the inner one is collected.
        async with aclosing(self._events(_Progress(request or GenerateRequest(**fields)))) as events:
            async for event in events:
                yield event

    async def generate(self, request: GenerateRequest | None = None, **fields: Any) -> Generation:
        """As `Client.generate`."""
        progress = _Progress(request or GenerateRequest(**fields))
        async with aclosing(self._events(progress)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return progress.finish(event)
        raise PeerUnavailable("the stream ended before the generation did")

    async def generate_samples(
        self, n: int, request: GenerateRequest | None = None, **fields: Any
    ) -> list[Generation]:
        """As `Client.generate_samples`."""
        request = request or GenerateRequest(**fields)
        _check_samples(request, n)
        first = _Progress(request)
        others: list[asyncio.Task[Generation]] = []
        try:
            async with aclosing(self._events(first)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        wanted = _other_samples(request, n, event.seed)
                        others = [asyncio.create_task(self.generate(each)) for each in wanted]
                    elif isinstance(event, Finished):
                        return [first.finish(event), *await asyncio.gather(*others)]
        finally:
            for other in others:
                other.cancel()
        raise PeerUnavailable("the stream ended before the generation did")

    async def describe_models(self) -> tuple[ModelDescription, ...]:
        """As `Client.describe_models`."""
        try:
            response = await self._stub.DescribeModels(pb.DescribeModelsRequest(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return tuple(codec.decode_model_description(model) for model in response.models)

    async def _events(self, progress: _Progress) -> AsyncGenerator[GenerateEvent, None]:
        while True:
            call = self._stub.Generate(
                codec.encode_generate_request(progress.next_request()), timeout=self._timeout_s
            )
            try:
                async for response in call:
                    event = codec.decode_generate_event(response)
                    if progress.news(event):
                        yield event
                return
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                if not progress.may_resume(error, self._resume_wait_s):
                    raise error from rpc_error
            finally:
                call.cancel()
            await asyncio.sleep(RESUME_PAUSE_S)


def _settings(address: str | PeerSettings) -> PeerSettings:
    return address if isinstance(address, PeerSettings) else PeerSettings(address=address)
