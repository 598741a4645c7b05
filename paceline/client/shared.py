"""What the synchronous and the asyncio client share: everything but the awaiting."""

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
CLOSED_MESSAGE = "the client was closed"
READY_PAUSE_S = 0.1
"""Longest first pause between two checks whether a coordinator is ready."""


@dataclass(frozen=True)
class Generation:
    """A finished generation. After a resume, `stats` covers the last stream only.

    `prompt_logprobs`: if the request asks for them, a row for each token of the prompt but the first: the token
    itself, then the most probable ones in its place.
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
        self.start_event: Started | None = None
        self.end_event: Finished | None = None
        self._tokens: list[Tokens] = []
        self._prompt: list[RowLogprobs] = []

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(token_id for tokens in self._tokens for token_id in tokens.token_ids)

    def add(self, event: GenerateEvent) -> None:
        """Add one event; of several `Started` the first counts."""
        if isinstance(event, Started):
            self.start_event = self.start_event or event
        elif isinstance(event, Tokens):
            self._tokens.append(event)
        elif isinstance(event, PromptLogprobs):
            self._prompt.extend(event.rows)
        else:
            self.end_event = event

    def generation(self) -> Generation:
        """The finished generation.

        Raises:
            PeerUnavailable: the stream ended without `Finished`.
        """
        if self.start_event is None or self.end_event is None:
            raise PeerUnavailable("the stream ended before the generation did")
        return Generation(
            text="".join(tokens.text for tokens in self._tokens) + self.end_event.text,
            token_ids=self.token_ids,
            prompt_token_ids=self.start_event.prompt_token_ids,
            finish_reason=self.end_event.reason,
            seed=self.start_event.seed,
            provenance=tuple(provenance for tokens in self._tokens for provenance in tokens.provenance),
            stats=self.end_event.stats,
            logprobs=tuple(row for tokens in self._tokens for row in tokens.logprobs),
            sample_index=self._sample_index,
            prompt_logprobs=tuple(self._prompt),
        )


@dataclass(frozen=True)
class Patience:
    """How long a request may go without a token before its error is raised, in seconds; 0: at once.

    Attributes:
        broken_s: after its stream broke, or if a service is gone, or if a request that had begun finds no room.
        refused_s: if a new request finds no room.
    """

    broken_s: float = RESUME_WAIT_S
    refused_s: float = 0.0


class Progress(Collector):
    """What has arrived of one request, and from it the continuation when its stream breaks.

    Args:
        request: the whole request.
        budget: of retries, which all requests of a client share.
    """

    def __init__(self, request: GenerateRequest, budget: RetryBudget | None = None) -> None:
        super().__init__(request.sample_index)
        self.request = request
        self.trace = CallTrace()
        self._retries = Retries(budget)
        self.fruitless = True
        """Whether the current try has brought no token yet."""
        self._broke_at: float | None = None
        """Time of the first break since the last token, on the monotonic clock; None: there was none."""

    def begin_trace(self) -> CallTrace:
        """Begin the request's span, as a context."""
        self.trace = start_call(self.request)
        return self.trace

    @property
    def rest(self) -> GenerateRequest:
        """The request, or its continuation after the tokens that have arrived."""
        if self.start_event is None:
            return self.request
        whole = len(self._prompt) == len(self.start_event.prompt_token_ids) - 1
        return replace(
            self.request,
            seed=self.start_event.seed,
            sampling=self.request.sampling.with_defaults(self.start_event.sampling),
            resume_token_ids=self.request.resume_token_ids + self.token_ids,
            prompt_logprobs=None if whole else self.request.prompt_logprobs,
        )

    def take(self, event: GenerateEvent) -> GenerateEvent | None:
        """Add an event; returns its new part, or None for what a resumed stream repeats."""
        part = self._new_part(event)
        if part is None:
            return None
        if isinstance(part, Tokens | Finished):
            self._note_progress()
        again = isinstance(part, Started) and self.start_event is not None
        self.add(part)
        self.trace.note(part)
        return None if again else part

    def _new_part(self, event: GenerateEvent) -> GenerateEvent | None:
        """The part of an event that is new: a resumed stream reports the prompt from its beginning."""
        if not isinstance(event, PromptLogprobs):
            return event
        count = len(self._prompt)
        follows = event.first_position <= count + 1
        require(follows, "prompt_logprobs first_position", event.first_position, f"at most {count + 1}")
        rows = event.rows[count + 1 - event.first_position :]
        return PromptLogprobs(count + 1, rows) if rows else None

    def _note_progress(self) -> None:
        """Count the try as a success at its first token; a service that only starts a stream may always die then."""
        self._broke_at = None
        if self.fruitless:
            self._retries.note_success()
            self.fruitless = False

    def retry_elsewhere(self) -> bool:
        """Begin a retry at another service at once; returns whether the budget allows it."""
        self.fruitless = True
        return self._retries.take_spare()

    def retry_pauses(self, error: PacelineError, patience: Patience) -> Iterator[float] | None:
        """Pauses in seconds, one after the other, before the next try; None: the stream had ended already.

        A try that brings no token counts against the patience.

        Raises (this, and the pauses):
            PacelineError: what broke the stream, if it isn't worth another try.
        """
        if self.end_event is not None:
            return None
        now = time.monotonic()
        self.fruitless = True
        if self._broke_at is None:
            self._broke_at = now
        waits = isinstance(error, PeerUnavailable) or (isinstance(error, Overloaded) and self.start_event is not None)
        left_s = self._broke_at + (patience.broken_s if waits else patience.refused_s) - now
        if not isinstance(error, PeerUnavailable | Overloaded) or left_s <= 0:
            raise error
        return self._retries.pauses(error, left_s)


class Readiness:
    """Whether the coordinator serves and has a link to its target, by its last answer."""

    def __init__(self, address: str, wait_s: float) -> None:
        self._wait_s = wait_s
        self._deadline: float | None = None
        self._no_link_text = f"coordinator at {address}: no link to its target yet"
        self._reason: PacelineError = PeerUnavailable(f"coordinator at {address} does not answer")
        self._backoff = Backoff(READY_PAUSE_S)
        self.is_ready = wait_s <= 0

    def next_pause_s(self) -> float:
        """Pause before the next check, which stays within the time to wait."""
        left_s = 0.0 if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return min(left_s, self._backoff.next_s(self._reason.retry_after_ms))

    def next_timeout_s(self) -> float:
        """Deadline of the next check; the time to wait begins with the first one."""
        now = time.monotonic()
        self._deadline = self._deadline or now + self._wait_s
        return max(self._deadline - now, READY_PAUSE_S)

    def note(self, answer: tuple[ModelDescription, ...] | PacelineError) -> None:
        """Take an answer or a failure.

        Raises:
            PacelineError: waiting doesn't help, or the time is over.
        """
        if isinstance(answer, tuple):
            self.is_ready = all(model.target_ready for model in answer)
            answer = PeerUnavailable(self._no_link_text)
        if not isinstance(answer, DeadlineExceeded):  # which says less than the error before it
            self._reason = answer
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        if not self.is_ready and (is_over or not isinstance(answer, PeerUnavailable | DeadlineExceeded)):
            raise self._reason


class ClientBase:
    """What both clients share; `Client` documents the arguments."""

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
        self._close_event = threading.Event()
        self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._patience = Patience(resume_wait_s, overload_wait_s)
        self._budget = RetryBudget()
        self._readiness = Readiness(peer.address, wait_ready)
        self._metadata = bearer(api_key)

    def calling(self, *, api_key: str | None = None, request_id: str = "") -> Self:
        """A client for another caller on the same channel, which this client closes.

        Args:
            api_key: sent with each call; None: no key.
            request_id: the request's id in the coordinator's log; empty: the coordinator chooses it.

        Raises:
            InvalidInput: not a possible key; the error doesn't show it.
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
        """Begin a call.

        Raises:
            Cancelled: the client was closed.
        """
        try:
            return method(message, timeout=timeout_s, metadata=metadata)
        except (ValueError, grpc.aio.UsageError) as error:  # which gRPC raises of a closed channel, too
            if not self._close_event.is_set():
                raise
            raise Cancelled(CLOSED_MESSAGE) from error


def is_sendable(api_key: str) -> bool:
    """Whether a text can be an API key, which a header carries as it is."""
    return _SENDABLE_KEY.fullmatch(api_key) is not None


def bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of every call with an API key; empty without one.

    Raises:
        InvalidInput: not a possible key; the error doesn't show it.
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
    """The request, or one made of fields."""
    return request or GenerateRequest(**fields)


def first_sample(n: int, request: GenerateRequest) -> GenerateRequest:
    """The first of n samples of a request; the others take their seed from its answer.

    Raises:
        InvalidInput: n, or a request that names a sample or resumes one.
    """
    index, token_ids = request.sample_index, request.resume_token_ids
    require(1 <= n <= MAX_SAMPLES, "n", n, f"in [1, {MAX_SAMPLES}]")
    require(index == 0, "sample_index", index, "0 with n, which numbers the samples from 0")
    require(not token_ids, "resume_token_ids", token_ids, "left out with n")
    return request


def other_samples(n: int, request: GenerateRequest, seed: int) -> list[GenerateRequest]:
    """Samples 1 to n - 1 of a request: the same prompt and seed, and noise of their own. Sample 0 has the prompt's
    log-probabilities, which are those of all."""
    return [replace(request, seed=seed, sample_index=index, prompt_logprobs=None) for index in range(1, n)]


def models_of(response: pb.DescribeModelsResponse) -> tuple[ModelDescription, ...]:
    """The models that a coordinator serves, at least one.

    Raises:
        ProtocolMismatch: the answer names no model.
    """
    if not response.models:
        raise ProtocolMismatch("the coordinator describes no model")
    return codec.decode_models(response)
