"""What several messages have in common: the messages inside them, fields that are checked or written alike, the
handshake, and errors inside a link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from paceline.protocol.codec.copying import (
    MAX_NAME_BYTES,
    MAX_TEXT_BYTES,
    UNREAD,
    Copier,
    Elsewhere,
    Most,
    Part,
    bound,
    check_bounds,
    copier,
    each,
    enumeration,
    register,
)
from paceline.protocol.errors import Code, InvalidInput, PacelineError, Unsupported, from_wire, require
from paceline.protocol.features import (
    MAX_FEATURE_BYTES,
    MAX_FEATURE_LAYERS,
    FeatureNeed,
    FeatureOffer,
    FeatureRequest,
    Features,
    FeatureType,
)
from paceline.protocol.generation import MAX_INPUT_TOKENS, MAX_STOP_TOKENS
from paceline.protocol.handshake import MAX_DRAFTERS, PROTOCOL_VERSION, Fingerprint, Hello, ServiceStatus, Welcome
from paceline.protocol.proposal import (
    MAX_DRAFTER_BYTES,
    MAX_PROPOSAL_NODES,
    MAX_SUPPORT_ENTRIES,
    Acceptance,
    Outcome,
    Proposal,
    SparseDistribution,
)
from paceline.protocol.records import StepTimings
from paceline.protocol.sampling import (
    FIELDS_WITH_DEFAULTS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_TOP_LOGPROBS,
    Grammar,
    GrammarKind,
    NoiseKey,
    SamplingParams,
    UnstatedNumber,
)
from paceline.protocol.session import MAX_TENANT_BYTES, Close, Failure, SessionSpec
from paceline.protocol.target import RowLogprobs
from paceline.protocol.trace_context import decode_traceparent
from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import types_pb2 as pb

MAX_UINT32 = (1 << 32) - 1
MAX_END_TOKENS = 2 * MAX_STOP_TOKENS
"""A request's stop tokens and as many of the model's own."""
LOGPROB_SLACK = 1e-3
"""The logarithm of a probability may pass 0 by rounding."""
MAX_ROW_LOGPROBS = MAX_PROPOSAL_NODES + 1 + MAX_TOP_LOGPROBS
"""Most log-probabilities of one row: those of the tokens that may be emitted there, and the most probable ones."""


def session_of(session_id: int) -> int:
    """The id itself; raises `InvalidInput` if no session can have it."""
    require(session_id >= 1, "session_id", session_id, "at least 1")
    return session_id


def check_known(name: str, message: Message) -> None:
    """Refuse a parameter that this version doesn't know: if it were ignored, the text would differ unnoticed."""
    unknown_fields = UnknownFieldSet(message)
    if len(unknown_fields):
        raise Unsupported(f"{name} field number {unknown_fields[0].field_number}: this version has no such parameter")


def check_ids(name: str, ids: Iterable[int]) -> None:
    """Refuse ids that a uint32 can't hold."""
    for token_id in ids:
        require(0 <= token_id <= MAX_UINT32, name, token_id, f"in [0, {MAX_UINT32}]")


def check_text(name: str, text: str) -> None:
    """Refuse text that UTF-8 can't hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput.of(name, text, "valid Unicode (no lone surrogates)") from error


def written_parents(parents: tuple[int, ...]) -> tuple[int, ...]:
    """The parents of a proposal's nodes as they are written on the wire: none for a chain."""
    return () if parents == tuple(range(-1, len(parents) - 1)) else parents


def _read_widths(widths: Sequence[int]) -> tuple[int, ...]:
    for width in widths:
        require(1 <= width <= MAX_PROPOSAL_NODES, "tree_widths", width, f"in [1, {MAX_PROPOSAL_NODES}] at each depth")
    return tuple(widths)


bound(
    pb.SamplingParams,
    "sampling",
    logit_bias=Most(MAX_LOGIT_BIAS_ENTRIES, "logit_bias entries"),
    bad_words=Most(MAX_BAD_WORDS, "bad_words"),
)
bound(pb.TokenSequence, "bad word", token_ids=Most(MAX_BAD_WORD_TOKENS, "bad_words tokens"))
bound(pb.Grammar, "grammar", **{kind.value: Elsewhere("Grammar looks at its bytes first") for kind in GrammarKind})
bound(
    pb.SessionSpec,
    "session",
    token_ids=Most(MAX_INPUT_TOKENS, "prefix length"),
    end_token_ids=MAX_END_TOKENS,
    tenant=Most(MAX_TENANT_BYTES, "tenant bytes"),
)
bound(pb.Fingerprint, "fingerprint", model=MAX_NAME_BYTES, tokenizer=MAX_NAME_BYTES, numeric=MAX_NAME_BYTES)
bound(pb.FeatureNeed, "", layers=Most(MAX_FEATURE_LAYERS, "layers"))
bound(pb.FeatureRequest, "features", dtype=MAX_NAME_BYTES)
bound(
    pb.Features,
    "features",
    dtype=MAX_NAME_BYTES,
    shape=3,
    layer_ids=UNREAD,
    data=Most(MAX_FEATURE_BYTES, "features bytes"),
    scales=MAX_FEATURE_BYTES // 4,
)
bound(
    pb.SparseDistribution,
    "support",
    token_ids=Most(MAX_SUPPORT_ENTRIES, "support entries"),
    probabilities=MAX_SUPPORT_ENTRIES,
)
bound(
    pb.Proposal,
    "proposal",
    token_ids=Most(MAX_PROPOSAL_NODES, "proposal nodes"),
    parents=MAX_PROPOSAL_NODES,
    draft_probabilities=Most(MAX_PROPOSAL_NODES, "draft_probabilities"),
    supports=MAX_PROPOSAL_NODES,
    drafter=MAX_DRAFTER_BYTES,
)
bound(
    pb.TraceContext,
    "trace",
    traceparent=Elsewhere("ignored where it is not valid, at one look"),
)
bound(
    pb.RowLogprobs,
    "row logprobs",
    token_ids=MAX_ROW_LOGPROBS,
    logprobs=MAX_ROW_LOGPROBS,
)

SESSION_ID = Part(decode=session_of)
TRACEPARENT = Part(
    lambda traceparent: pb.TraceContext(traceparent=traceparent) if traceparent else None,
    lambda trace: decode_traceparent(trace.traceparent),
    field="trace",
)
TREE_WIDTHS = Part(decode=_read_widths)
ACCEPTANCE = enumeration("acceptance", Acceptance, pb.Acceptance)
CLOSE = copier(Close, pb.Close, session_id=SESSION_ID)
copier(Fingerprint, pb.Fingerprint)


def _encode_grammar(grammar: Grammar) -> pb.Grammar:
    check_text(grammar.kind.value, grammar.text)
    return pb.Grammar(**{grammar.kind.value: grammar.text})


def _decode_grammar(message: pb.Grammar) -> Grammar:
    check_known("grammar", message)
    kind = message.WhichOneof("language")
    if kind is None:
        raise InvalidInput.of("grammar", kind, f"one of {', '.join(kind.value for kind in GrammarKind)}")
    return Grammar(GrammarKind(kind), getattr(message, kind))


register(pb.Grammar, Copier(Grammar, _encode_grammar, _decode_grammar))


def _check_sampling(message: pb.SamplingParams) -> None:
    check_known("sampling", message)
    for word in message.bad_words:
        check_bounds(word)


_NUMBERS: dict[str, Any] = dict.fromkeys(
    FIELDS_WITH_DEFAULTS, Part(lambda number: None if isinstance(number, UnstatedNumber) else number)
)
_SAMPLING = copier(
    SamplingParams,
    pb.SamplingParams,
    _check_sampling,
    **_NUMBERS,
    logit_bias=Part(dict, lambda biases: tuple(biases.items())),
    bad_words=each(Part(lambda word: pb.TokenSequence(token_ids=word), lambda word: tuple(word.token_ids))),
)


def _encode_sampling(params: SamplingParams) -> pb.SamplingParams:
    require(params.top_k <= MAX_UINT32, "top_k", params.top_k, f"at most {MAX_UINT32}")
    check_ids("min_tokens", (params.min_tokens,))
    check_ids("logit_bias id", (token_id for token_id, _ in params.logit_bias))
    for word in params.bad_words:
        check_ids("bad_words id", word)
    return _SAMPLING.encode(params)


register(pb.SamplingParams, Copier(SamplingParams, _encode_sampling, _SAMPLING.decode))
copier(NoiseKey, pb.NoiseKey)
copier(SessionSpec, pb.SessionSpec, acceptance=ACCEPTANCE, traceparent=TRACEPARENT)


def _check_proposal(message: pb.Proposal) -> None:
    require(message.proposal_id >= 1, "proposal_id", message.proposal_id, "at least 1")


copier(SparseDistribution, pb.SparseDistribution)
PROPOSAL = copier(Proposal, pb.Proposal, _check_proposal, parents=Part(written_parents, tuple))


def _check_outcome(message: pb.Outcome) -> None:
    in_range = -1 <= message.node < MAX_PROPOSAL_NODES
    require(in_range, "outcome node", message.node, f"in [-1, {MAX_PROPOSAL_NODES - 1}]")


OUTCOME = copier(Outcome, pb.Outcome, _check_outcome)


def _check_timings(message: pb.StepTimings) -> None:
    for field in ("queue_ms", "forward_ms", "sample_ms", "service_ms"):
        value = getattr(message, field)
        require(math.isfinite(value) and value >= 0, f"timings {field}", value, "finite and at least 0")


TIMINGS = copier(StepTimings, pb.StepTimings, _check_timings)


def _check_logprobs(message: pb.RowLogprobs) -> None:
    ids = len(message.token_ids)
    require(len(message.logprobs) == ids, "row logprobs", len(message.logprobs), f"{ids}, one for each id")
    for logprob in message.logprobs:
        require(logprob <= LOGPROB_SLACK, "row logprob", logprob, "at most 0")


copier(RowLogprobs, pb.RowLogprobs, _check_logprobs)


def _read_dtype(dtype: str) -> FeatureType:
    try:
        return FeatureType(dtype)
    except ValueError as error:
        raise InvalidInput.of("features dtype", dtype, f"one of {', '.join(FeatureType)}") from error


_DTYPE = Part(str, _read_dtype)
copier(FeatureNeed, pb.FeatureNeed)
copier(FeatureOffer, pb.FeatureOffer)
copier(FeatureRequest, pb.FeatureRequest, dtype=_DTYPE)


FEATURES = copier(Features, pb.Features, unused_fields=["layer_ids"], session_id=SESSION_ID, dtype=_DTYPE)


LinkMessage = target_pb.TargetCommand | target_pb.TargetEvent | draft_pb.DraftCommand | draft_pb.DraftEvent

MAX_FACTS = 64
"""Most named facts of one failure; ours have at most ten."""


def _check_failure(message: pb.Failure) -> None:
    size = sum(len(name.encode()) + len(value.encode()) for name, value in message.metadata.items())
    require(size <= MAX_TEXT_BYTES, "failure metadata bytes", size, f"at most {MAX_TEXT_BYTES}")


bound(pb.Failure, "failure", reason=MAX_NAME_BYTES, message=MAX_TEXT_BYTES, metadata=MAX_FACTS)
# Session 0 is allowed here: it answers a message that named no session.
FAILURE = copier(
    Failure,
    pb.Failure,
    _check_failure,
    code=Part(decode=lambda code: code if code in Code.__members__.values() else int(Code.INTERNAL)),
    metadata=Part(dict, dict),
)


def failure_of(session_id: int, error: PacelineError, session_closed: bool = False) -> Failure:
    """The `Failure` that carries an exception to the other side of a link."""
    return Failure(
        session_id=session_id,
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        metadata=dict(error.metadata),
        retry_after_ms=error.retry_after_ms,
        retry_safe=error.retry_safe,
        session_closed=session_closed,
    )


def error_of(failure: Failure) -> PacelineError:
    """The exception that a `Failure` carries."""
    return from_wire(
        failure.reason, failure.message, metadata=failure.metadata, retry_after_ms=failure.retry_after_ms
    )


def session_id_of(message: LinkMessage) -> int:
    """The session of a message that may be malformed in every other way; 0 if it names none."""
    oneof = message.DESCRIPTOR.oneofs[0].name
    kind = message.WhichOneof(oneof)
    return 0 if kind is None else int(getattr(message, kind).session_id)


bound(pb.Hello, "hello", incarnation=MAX_TEXT_BYTES)
bound(
    pb.Welcome,
    "welcome",
    incarnation=MAX_TEXT_BYTES,
    drafters=Most(MAX_DRAFTERS, each=MAX_DRAFTER_BYTES),
    drafter_needs=MAX_DRAFTERS,
    default_name=MAX_DRAFTER_BYTES,
)
bound(pb.ServiceStatus, "status", incarnation=MAX_TEXT_BYTES)

# Versions are compared by the link, not here: an old hello must still be readable.
HELLO = copier(Hello, pb.Hello)


def _check_welcome(message: pb.Welcome) -> None:
    """A welcome of our own protocol version must state its limits."""
    if message.protocol_version == PROTOCOL_VERSION:
        for field in ("max_length", "max_sessions", "max_proposal_nodes", "max_frame_bytes"):
            require(getattr(message, field) >= 1, f"welcome.{field}", getattr(message, field), "at least 1")


WELCOME = copier(Welcome, pb.Welcome, _check_welcome)
SERVICE_STATUS = copier(ServiceStatus, pb.ServiceStatus)
