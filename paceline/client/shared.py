"""What the synchronous and the asyncio client have in common: all but the awaiting."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import grpc

from paceline.client.tracing import CallTrace, start_call
from paceline.protocol import codec
from paceline.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    ProtocolMismatch,
    require,
)
from paceline.protocol.generation import (
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    ModelDescription,
    PromptLogprobs,
    Provenance,
    Started,
    Tokens,
)
from paceline.protocol.records import GenerationStats
from paceline.protocol.sampling import MAX_SAMPLES
from paceline.protocol.target import RowLogprobs
from paceline.rpc.retries import Backoff, Retries, RetryBudget
from paceline.runtime.config import COORDINATOR_PORT, LOCALHOST, PeerSettings
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = f"{LOCALHOST}:{COORDINATOR_PORT}"
RESUME_WAIT_S = 60.0
_SENDABLE_KEY = re.compile(r"[!-~]{1,1024}")
CLOSED = "the client was closed"
READY_PAUSE_S = 0.1
"""Bound of the first pause between two questions whether a coordinator is ready."""


@dataclass(frozen=True)
class Generation:
    """A finished generation. After a resume, `stats` covers the last stream only.

    `prompt_logprobs`: where asked for, a row for each token of the prompt behind the first: the token itself, then
    the most probable ones in its place.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    provenance: tuple[Provenance, ...]
    stats: GenerationStats
    logprobs: tuple[RowLogprobs, ...] = ()
    sample_index: int = 0
    prompt_logprobs: tuple[RowLogprobs, ...] = ()


class Collector:
    """Joins the events of one request's stream."""

    def __init__(self, sample_index: int = 0) -> None:
        self._sample_index = sample_index
        self.started: Started | None = None
        self.finished: Finished | None = None
        self._tokens: list[Tokens] = []
        self._prompt: list[RowLogprobs] = []

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What has arrived."""
        return tuple(token_id for tokens in self._tokens for token_id in tokens.token_ids)

    def add(self, event: GenerateEvent) -> None:
        """Keep one event; of several `Started`, the first."""
        if isinstance(event, Started):
            self.started = self.started or event
        elif isinstance(event, Tokens):
            self._tokens.append(event)
        elif isinstance(event, PromptLogprobs):
            self._prompt.extend(event.rows)
        else:
            self.finished = event

    def generation(self) -> Generation:
        """The whole.

        Raises:
            PeerUnavailable: the stream ended without `Finished`.
        """
        if self.started is None or self.finished is None:
            raise PeerUnavailable("the stream ended before the generation did")
        return Generation(
            text="".join(tokens.text for tokens in self._tokens) + self.finished.text,
            token_ids=self.token_ids,
            prompt_token_ids=self.started.prompt_token_ids,
            finish_reason=self.finished.reason,
            seed=self.started.seed,
            provenance=tuple(provenance for tokens in self._tokens for provenance in tokens.provenance),
            stats=self.finished.stats,
            logprobs=tuple(row for tokens in self._tokens for row in tokens.logprobs),
            sample_index=self._sample_index,
            prompt_logprobs=tuple(self._prompt),
        )


@dataclass(frozen=True)
class Patience:
    """How long a request may stay without a token before its error is raised, in seconds; 0: not at all.

    Attributes:
        broken_s: where its stream broke, or a peer is gone; and, where it had begun, where there is no room.
        refused_s: where there was no room for it from the first.
    """

    broken_s: float = RESUME_WAIT_S
    refused_s: float = 0.0


class Progress(Collector):
    """What has arrived of one request, and so how to go on with it when its stream breaks.

    Args:
        request: the whole.
        budget: of tries again, which all requests of a client share.
    """

    def __init__(self, request: GenerateRequest, budget: RetryBudget | None = None) -> None:
        super().__init__(request.sample_index)
        self.request = request
        self.trace = CallTrace()
        self._retries = Retries(budget)
        self.fruitless = True
        """Whether the present try has brought no token yet."""
        self._broke_at: float | None = None
        """When the stream broke for the first time behind the last token, on the monotonic clock; None: it hasn't."""

    def traced(self) -> CallTrace:
        """Begin the request's span; to be entered."""
        self.trace = start_call(self.request)
        return self.trace

    @property
    def rest(self) -> GenerateRequest:
        """The request, or its continuation after what has arrived."""
        if self.started is None:
            return self.request
        whole = len(self._prompt) == len(self.started.prompt_token_ids) - 1
        return replace(
            self.request,
            seed=self.started.seed,
            sampling=self.request.sampling.stated(self.started.sampling),
            resume_token_ids=self.request.resume_token_ids + self.token_ids,
            prompt_logprobs=None if whole else self.request.prompt_logprobs,
        )

    def take(self, arrived: GenerateEvent) -> GenerateEvent | None:
        """Keep what arrived; returns the event, or None for what a resumed stream brings again."""
        event = self._unknown(arrived)
        if event is None:
            return None
        if isinstance(event, Tokens | Finished):
            self._gets_on()
        again = isinstance(event, Started) and self.started is not None
        self.add(event)
        self.trace.took(event)
        return None if again else event

    def _unknown(self, event: GenerateEvent) -> GenerateEvent | None:
        """What an event brings that hasn't come before: a resumed stream reports the prompt from its beginning."""
        if not isinstance(event, PromptLogprobs):
            return event
        known = len(self._prompt)
        follows = event.first_position <= known + 1
        require(follows, "prompt_logprobs first_position", event.first_position, f"at most {known + 1}, the next")
        rows = event.rows[known + 1 - event.first_position :]
        return PromptLogprobs(known + 1, rows) if rows else None

    def _gets_on(self) -> None:
        """A try counts as a success with its first token: one that only starts may be a service that always dies."""
        self._broke_at = None
        if self.fruitless:
            self._retries.succeeded()
            self.fruitless = False

    def moves(self) -> bool:
        """Begin another try at once, if the budget has one to spare: at a service that has not refused this one."""
        self.fruitless = True
        return self._retries.take_elsewhere()

    def broke(self, error: PacelineError, patience: Patience) -> Iterator[float] | None:
        """Pauses to make one after the other, in seconds, before the stream is asked for again; None: it had ended.

        A try that brings no token uses up the time for tries.

        Raises (this, and the pauses):
            PacelineError: what broke it, where it isn't worth another try.
        """
        if self.finished is not None:
            return None
        now = time.monotonic()
        self.fruitless = True
        if self._broke_at is None:
            self._broke_at = now
        waits = isinstance(error, PeerUnavailable) or (isinstance(error, Overloaded) and self.started is not None)
        left_s = self._broke_at + (patience.broken_s if waits else patience.refused_s) - now
        if not isinstance(error, PeerUnavailable | Overloaded) or left_s <= 0:
            raise error
        return self._retries.pauses(error, left_s)


class Readiness:
    """Whether the coordinator serves and its target is linked, as far as it has been asked."""

    def __init__(self, address: str, wait_s: float) -> None:
        self._wait_s = wait_s
        self._deadline: float | None = None
        self._unlinked = f"coordinator at {address}: no link to its target yet"
        self._reason: PacelineError = PeerUnavailable(f"coordinator at {address} does not answer")
        self._backoff = Backoff(READY_PAUSE_S)
        self.reached = wait_s <= 0

    def next_pause_s(self) -> float:
        """Before the next question, which comes within the time to wait."""
        left_s = 0.0 if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return min(left_s, self._backoff.next_s(self._reason.retry_after_ms))

    def next_timeout_s(self) -> float:
        """Deadline of the next question; the time to wait begins with the first."""
        now = time.monotonic()
        self._deadline = self._deadline or now + self._wait_s
        return max(self._deadline - now, READY_PAUSE_S)

    def note(self, answer: tuple[ModelDescription, ...] | PacelineError) -> None:
        """Take an answer in, or a failure.

        Raises:
            PacelineError: waiting doesn't mend it, or the time is over.
        """
        if isinstance(answer, tuple):
            self.reached = all(model.target_ready for model in answer)
            answer = PeerUnavailable(self._unlinked)
        if not isinstance(answer, DeadlineExceeded):  # which has no reason of its own
            self._reason = answer
        over = self._deadline is not None and time.monotonic() >= self._deadline
        if not self.reached and (over or not isinstance(answer, PeerUnavailable | DeadlineExceeded)):
            raise self._reason


class ClientBase:
    """What both clients share, which is all but the awaiting; `Client` says what the arguments are."""

    _open: ClassVar[Any]
    """Opens the channel: `paceline.rpc.channel`'s, for threads or for asyncio."""

    def __init__(
        self,
        address: str | PeerSettings = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        resume_wait_s: float = RESUME_WAIT_S,
        overload_wait_s: float = 0.0,
        wait_ready: float = 0.0,
        api_key: str | None = None,
    ) -> None:
        peer = address if isinstance(address, PeerSettings) else PeerSettings(address=address)
        self._channel = self._open(peer)
        self._closed = threading.Event()
        self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._patience = Patience(resume_wait_s, overload_wait_s)
        self._budget = RetryBudget()
        self._readiness = Readiness(peer.address, wait_ready)
        self._metadata = bearer(api_key)

    def calling(self, *, api_key: str | None = None, request_id: str = "") -> Self:
        """The same client for another caller: its calls share this one's channel, which this one alone closes.

        Args:
            api_key: sent with each call; None: none is.
            request_id: what the coordinator's log calls the request; empty: its own choice.

        Raises:
            InvalidInput: what no key can be, without showing it.
        """
        other = copy.copy(self)
        other._metadata = bearer(api_key) + ((("x-request-id", request_id),) if request_id else ())
        return other

    def _progress(self, request: GenerateRequest) -> Progress:
        return Progress(request, self._budget)

    def _begin(self, progress: Progress) -> Any:
        metadata = (*self._metadata, *progress.trace.metadata)
        message = codec.encode_generate_request(progress.rest)
        return self._call(self._stub.Generate, message, self._timeout_s, metadata)

    def _ask(self, timeout_s: float | None) -> Any:
        return self._call(self._stub.DescribeModels, pb.DescribeModelsRequest(), timeout_s, self._metadata)

    def _call(self, method: Callable[..., Any], message: Any, timeout_s: float | None, metadata: object) -> Any:
        """Begin a call. gRPC's own errors of a closed channel have no type of their own.

        Raises:
            Cancelled: the client was closed.
        """
        try:
            return method(message, timeout=timeout_s, metadata=metadata)
        except (ValueError, grpc.aio.UsageError) as error:
            if not self._closed.is_set():
                raise
            raise Cancelled(CLOSED) from error


def is_sendable(api_key: str) -> bool:
    """Whether a text can be an API key: a header takes it as it is."""
    return _SENDABLE_KEY.fullmatch(api_key) is not None


def bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of every call with an API key; without one there is none.

    Raises:
        InvalidInput: what no key can be, without showing it.
    """
    if api_key is None:
        return ()
    require(
        is_sendable(api_key),
        "api_key",
        f"{len(api_key)} characters",
        "1 to 1024 characters of ASCII without white space",
    )
    return (("authorization", f"Bearer {api_key}"),)


def request_of(request: GenerateRequest | None, fields: Mapping[str, Any]) -> GenerateRequest:
    """A request, or that of its fields."""
    return request or GenerateRequest(**fields)


def first_sample(n: int, request: GenerateRequest) -> GenerateRequest:
    """The first of n samples of a request; the others go by what it is told of the seed.

    Raises:
        InvalidInput: n, or a request that names a sample or resumes one.
    """
    index, resumed = request.sample_index, request.resume_token_ids
    require(1 <= n <= MAX_SAMPLES, "n", n, f"in [1, {MAX_SAMPLES}]")
    require(index == 0, "sample_index", index, "0 with n, which counts from it")
    require(not resumed, "resume_token_ids", resumed, "left out with n")
    return request


def other_samples(n: int, request: GenerateRequest, seed: int) -> list[GenerateRequest]:
    """Samples 1 to n - 1 of a request: the same prompt and seed, and noise of their own. Sample 0 has the prompt's
    log-probabilities, which are those of all."""
    return [replace(request, seed=seed, sample_index=index, prompt_logprobs=None) for index in range(1, n)]


def models_of(response: pb.DescribeModelsResponse) -> tuple[ModelDescription, ...]:
    """What a coordinator says it serves.

    Raises:
        ProtocolMismatch: it serves one model at least, and names none.
    """
    if not response.models:
        raise ProtocolMismatch("the coordinator describes no model")
    return codec.decode_models(response)
