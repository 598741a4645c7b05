"""Messages between clients and the coordinator."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.protocol.codec.copying import (
    MAX_NAME_BYTES,
    MAX_TEXT_BYTES,
    Elsewhere,
    Most,
    OneOf,
    Part,
    bound,
    check_bounds,
    copier,
    each,
    enumeration,
)
from paceline.protocol.codec.parts import (
    ACCEPTANCE,
    TREE_WIDTHS,
    check_ids,
    check_known,
    check_text,
)
from paceline.protocol.errors import require
from paceline.protocol.explanation import (
    EXPLAINED_ROWS,
    MAX_CANDIDATES,
    MAX_EXPLAINED_DEPTH,
    MAX_MODES,
    CandidateExplanation,
    GroupReport,
    ModeReport,
    PlanExplanation,
)
from paceline.protocol.generation import (
    MAX_INPUT_TOKENS,
    MAX_MESSAGES,
    MAX_MODEL_BYTES,
    MAX_PEERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    ChatMessage,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    ModelDescription,
    PeerDescription,
    PeerKind,
    PromptLogprobs,
    Provenance,
    SpeculationSettings,
    Started,
    Tokens,
)
from paceline.protocol.proposal import MAX_DRAFTER_BYTES, MAX_PROPOSAL_NODES
from paceline.protocol.records import MAX_RECORDS, GenerationStats, RoundRecord, RoundStats
from paceline.protocol.session import MAX_TENANT_BYTES
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import types_pb2

OF_A_MESSAGE = Elsewhere("a message of 4 MiB has no more, and it is copied once")
BY_THE_MODEL = Elsewhere("a message of 4 MiB has no more; paceline/models/prompts.py asks the model how much")
MAX_MODELS = 64
"""Most models in one description; a coordinator has one."""
MAX_DRAFTERS_SERVED = 1 << 16
"""Most drafters of all draft services of a coordinator."""

bound(
    pb.GenerateRequest,
    "",
    model=Most(MAX_MODEL_BYTES, "model bytes"),
    prompt=BY_THE_MODEL,
    stop=Most(MAX_STOP_STRINGS, "stop strings"),
    resume_token_ids=Most(MAX_INPUT_TOKENS, "resume_token_ids"),
    stop_token_ids=Most(MAX_STOP_TOKENS, "stop_token_ids"),
    prediction=Most(MAX_INPUT_TOKENS, "prediction"),
    prediction_text=BY_THE_MODEL,
)
bound(pb.ChatInput, "", messages=Most(MAX_MESSAGES, "chat messages"))
bound(pb.ChatMessage, "", role=Elsewhere("one of three words"), content=BY_THE_MODEL)
bound(pb.TokenInput, "", token_ids=Most(MAX_INPUT_TOKENS, "token_ids"))
bound(
    pb.SpeculationSettings,
    "",
    drafter=Most(MAX_DRAFTER_BYTES, "drafter bytes"),
    tree_widths=Most(MAX_PROPOSAL_NODES, "tree_widths", unit="depths"),
)
bound(pb.GenerationStarted, "started", prompt_token_ids=MAX_INPUT_TOKENS, model=MAX_NAME_BYTES)
bound(pb.PromptLogprobs, "prompt_logprobs", rows=MAX_INPUT_TOKENS)
bound(
    pb.GeneratedTokens,
    "tokens",
    token_ids=MAX_INPUT_TOKENS,
    text=OF_A_MESSAGE,
    provenance=MAX_INPUT_TOKENS,
    logprobs=MAX_INPUT_TOKENS,
    text_ends=MAX_INPUT_TOKENS,
    replaced_token_ids=MAX_INPUT_TOKENS,
    records=MAX_RECORDS,
)
bound(pb.GenerationFinished, "finished", text=OF_A_MESSAGE)
bound(pb.GenerationStats, "stats", acceptance_histogram=MAX_PROPOSAL_NODES + 1, records=MAX_RECORDS)
bound(
    pb.PlanExplanation,
    "explanation",
    target_alone_ms=len(EXPLAINED_ROWS),
    target_beside_ms=len(EXPLAINED_ROWS),
    acceptance=MAX_EXPLAINED_DEPTH,
    ngram_acceptance=MAX_EXPLAINED_DEPTH,
    candidates=MAX_CANDIDATES,
)
bound(pb.CandidateExplanation, "candidate", name=MAX_NAME_BYTES)
bound(pb.ModeReport, "mode", name=MAX_NAME_BYTES, state=MAX_NAME_BYTES)
bound(pb.GroupReport, "group", mode=MAX_NAME_BYTES, modes=MAX_MODES)
bound(pb.RoundRecord, "record", drafter=MAX_DRAFTER_BYTES, mode=MAX_NAME_BYTES)
bound(
    pb.ModelDescription,
    "model",
    name=MAX_NAME_BYTES,
    drafters=Most(MAX_DRAFTERS_SERVED, each=MAX_NAME_BYTES),
    peers=Most(MAX_PEERS, "peers"),
    tenant=MAX_TENANT_BYTES,
)
bound(pb.DescribeModelsResponse, "", models=Most(MAX_MODELS, "models"))
bound(pb.PeerDescription, "peer", address=MAX_NAME_BYTES, problem=MAX_TEXT_BYTES)

_MESSAGE = copier(ChatMessage, pb.ChatMessage)


def _check_request(message: pb.GenerateRequest) -> None:
    check_known("generate request", message)
    kind = message.WhichOneof("input")
    require(kind is not None, "input", kind, "one of prompt, chat, tokens")
    check_bounds(message.chat)
    check_bounds(message.tokens)
    chat, token_ids = message.chat.messages, message.tokens.token_ids
    require(kind != "chat" or len(chat) >= 1, "chat messages", len(chat), "at least 1")
    require(kind != "tokens" or len(token_ids) >= 1, "token_ids", len(token_ids), "at least 1 token")


copier(SpeculationSettings, pb.SpeculationSettings, tree_widths=TREE_WIDTHS)
REQUEST = copier(
    GenerateRequest,
    pb.GenerateRequest,
    _check_request,
    messages=Part(
        lambda messages: pb.ChatInput(messages=map(_MESSAGE.encode, messages)) if messages else None,
        lambda chat: tuple(map(_MESSAGE.decode, chat.messages)),
        field="chat",
    ),
    token_ids=Part(
        lambda token_ids: pb.TokenInput(token_ids=token_ids) if token_ids else None,
        lambda tokens: tuple(tokens.token_ids),
        field="tokens",
    ),
    # A client that names no rule asks for coupled.
    acceptance=Part(ACCEPTANCE.encode, lambda number: ACCEPTANCE.decode(number or types_pb2.ACCEPTANCE_COUPLED)),
)


def encode_request(request: GenerateRequest) -> pb.GenerateRequest:
    """A client's request; raises `InvalidInput` for what the wire can't hold."""
    check_ids("token_ids", request.token_ids)
    check_ids("resume_token_ids", request.resume_token_ids)
    check_ids("stop_token_ids", request.stop_token_ids)
    check_ids("prediction", request.prediction)
    check_ids("max_new_tokens", () if request.max_new_tokens is None else (request.max_new_tokens,))
    for name, text in _texts(request):
        check_text(name, text)
    return REQUEST.encode(request)


def _texts(request: GenerateRequest) -> Iterable[tuple[str, str]]:
    yield "model", request.model
    yield "prompt", request.prompt or ""
    yield "prediction_text", request.prediction_text
    yield "drafter", request.speculation.drafter
    yield from (("stop", stop) for stop in request.stop)
    yield from (("content", message.content) for message in request.messages)


_RECOVERED = types_pb2.PROVENANCE_RECOVERED


def _check_tokens(message: pb.GeneratedTokens) -> None:
    count = len(message.token_ids)
    ends = len(message.text_ends)
    require(ends in (0, count), "text_ends", ends, f"0 or {count}, one for each token")
    require(len(message.provenance) == count, "provenance", len(message.provenance), f"{count}, one for each token")
    replacements, recovered = len(message.replaced_token_ids), list(message.provenance).count(_RECOVERED)
    limit = f"0 or {recovered}, one for each recovered token"
    require(replacements in (0, recovered), "replaced_token_ids", replacements, limit)
    rows = len(message.logprobs)
    require(rows in (0, count), "logprobs rows", rows, f"0 or {count}, one for each token")


copier(RoundRecord, pb.RoundRecord)
copier(CandidateExplanation, pb.CandidateExplanation)
copier(ModeReport, pb.ModeReport)
copier(GroupReport, pb.GroupReport)
copier(PlanExplanation, pb.PlanExplanation)
copier(RoundStats, pb.RoundStats)
copier(GenerationStats, pb.GenerationStats)
EVENT: OneOf[GenerateEvent, pb.GenerateResponse] = OneOf(
    "generate event",
    pb.GenerateResponse,
    {
        "started": copier(Started, pb.GenerationStarted),
        "tokens": copier(
            Tokens,
            pb.GeneratedTokens,
            _check_tokens,
            provenance=each(enumeration("provenance", Provenance, types_pb2.Provenance)),
        ),
        "finished": copier(
            Finished,
            pb.GenerationFinished,
            reason=enumeration("finish reason", FinishReason, pb.FinishReason),
        ),
        "prompt_logprobs": copier(PromptLogprobs, pb.PromptLogprobs),
    },
)
copier(PeerDescription, pb.PeerDescription, kind=enumeration("peer kind", PeerKind, pb.PeerKind))
MODEL = copier(ModelDescription, pb.ModelDescription)


def decode_models(message: pb.DescribeModelsResponse) -> tuple[ModelDescription, ...]:
    """What a coordinator says it serves, checked."""
    check_bounds(message)
    return tuple(map(MODEL.decode, message.models))
