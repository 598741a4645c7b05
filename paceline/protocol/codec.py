"""The only conversion between protobuf messages and domain objects.

`encode_*` turns a domain object into its message, `decode_*` turns a message
into a domain object and checks it: whatever a decoder returns is within its
limits, and what is not raises `InvalidInput` naming field, value and limit.
Values that the wire holds as float32 (temperature, top_p, q …) come back
rounded to float32; encoding them again changes nothing, so every process
behind the first hop sees the same bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from paceline.protocol.draft import (
    Commit,
    DraftBudget,
    DraftCommand,
    DraftedProposal,
    DraftEvent,
    DraftOpen,
    DraftOpened,
    Verifying,
)
from paceline.protocol.errors import Code, InvalidInput, PacelineError, Unsupported, from_wire, require
from paceline.protocol.generation import (
    ChatMessage,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    ModelDescription,
    Provenance,
    SpeculationSettings,
    Started,
    Tokens,
)
from paceline.protocol.handshake import PROTOCOL_VERSION, Fingerprint, Hello, ServiceStatus, Welcome
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT, Acceptance, Outcome, Proposal, SparseDistribution
from paceline.protocol.records import GenerationStats, RoundRecord, StepTimings
from paceline.protocol.sampling import MAX_DRAFTER_BYTES, Grammar, GrammarKind, NoiseKey, SamplingParams
from paceline.protocol.session import Close, Failure, Features
from paceline.protocol.target import (
    MAX_PREFETCHED,
    Prefetch,
    Round,
    RowLogprobs,
    SelfStarted,
    TargetCommand,
    TargetEvent,
    TargetOpen,
    TargetOpened,
    Verdict,
)
from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import types_pb2 as pb

MAX_FEATURE_LAYERS = 64
MAX_FAN_OUT = 64
MAX_UINT32 = (1 << 32) - 1
PROBABILITY_SLACK = 1e-6
"""A sum of float64 probabilities may pass 1 by rounding."""

_TRACEPARENT = re.compile(
    "(?!ff)(?P<version>[0-9a-f]{2})(?P<fields>-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(?P<more>-.*)?"
)
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ACCEPTANCES = {
    Acceptance.COUPLED: pb.ACCEPTANCE_COUPLED,
    Acceptance.REJECTION: pb.ACCEPTANCE_REJECTION,
    Acceptance.BLOCK: pb.ACCEPTANCE_BLOCK,
}
_PROVENANCES = {
    Provenance.ACCEPTED: pb.PROVENANCE_ACCEPTED,
    Provenance.RECOVERED: pb.PROVENANCE_RECOVERED,
    Provenance.BONUS: pb.PROVENANCE_BONUS,
    Provenance.TARGET: pb.PROVENANCE_TARGET,
}
_FINISH_REASONS = {
    FinishReason.STOP: generation_pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb.FINISH_REASON_LENGTH,
}

LinkMessage = target_pb.TargetCommand | target_pb.TargetEvent | draft_pb.DraftCommand | draft_pb.DraftEvent
Domain = TypeVar("Domain")


# --- handshake ---------------------------------------------------------------


def encode_hello(hello: Hello) -> pb.Hello:
    """The first message of a link."""
    return pb.Hello(
        protocol_version=hello.protocol_version,
        incarnation=hello.incarnation,
        fingerprint=encode_fingerprint(hello.fingerprint),
    )


def decode_hello(message: pb.Hello) -> Hello:
    """Versions are compared by the link, not here: an old hello must still be readable."""
    return Hello(message.incarnation, decode_fingerprint(message.fingerprint), message.protocol_version)


def encode_welcome(welcome: Welcome) -> pb.Welcome:
    """The first message back."""
    return pb.Welcome(
        protocol_version=welcome.protocol_version,
        incarnation=welcome.incarnation,
        fingerprint=encode_fingerprint(welcome.fingerprint),
        max_length=welcome.max_length,
        max_sessions=welcome.max_sessions,
        max_proposal_nodes=welcome.max_proposal_nodes,
        max_frame_bytes=welcome.max_frame_bytes,
        drafters=welcome.drafters,
        max_lease=welcome.max_lease,
        max_prefetched=welcome.max_prefetched,
    )


def decode_welcome(message: pb.Welcome) -> Welcome:
    """A welcome of our own protocol version must state its limits."""
    if message.protocol_version == PROTOCOL_VERSION:
        for field in ("max_length", "max_sessions", "max_proposal_nodes", "max_frame_bytes"):
            require(getattr(message, field) >= 1, f"welcome.{field}", getattr(message, field), "at least 1")
    return Welcome(
        incarnation=message.incarnation,
        fingerprint=decode_fingerprint(message.fingerprint),
        max_length=message.max_length,
        max_sessions=message.max_sessions,
        max_proposal_nodes=message.max_proposal_nodes,
        max_frame_bytes=message.max_frame_bytes,
        drafters=tuple(message.drafters),
        protocol_version=message.protocol_version,
        max_lease=message.max_lease,
        max_prefetched=message.max_prefetched,
    )


def encode_fingerprint(fingerprint: Fingerprint) -> pb.Fingerprint:
    """What identifies a model."""
    return pb.Fingerprint(
        model=fingerprint.model,
        tokenizer=fingerprint.tokenizer,
        vocab_size=fingerprint.vocab_size,
        numeric=fingerprint.numeric,
    )


def decode_fingerprint(message: pb.Fingerprint) -> Fingerprint:
    """Inverse of `encode_fingerprint`."""
    return Fingerprint(message.model, message.tokenizer, message.vocab_size, message.numeric)


# --- target link -------------------------------------------------------------


def encode_target_command(command: TargetCommand) -> target_pb.TargetCommand:
    """One message to the target."""
    if isinstance(command, Round):
        return target_pb.TargetCommand(round=_encode_round(command))
    if isinstance(command, TargetOpen):
        return target_pb.TargetCommand(open=_encode_target_open(command))
    if isinstance(command, Prefetch):
        return target_pb.TargetCommand(prefetch=_encode_prefetch(command))
    return target_pb.TargetCommand(close=pb.Close(session_id=command.session_id))


def decode_target_command(message: target_pb.TargetCommand) -> TargetCommand:
    """One message to the target, checked."""
    kind = message.WhichOneof("command")
    if kind == "round":
        return _decode_round(message.round)
    if kind == "open":
        return _decode_target_open(message.open)
    if kind == "prefetch":
        return _decode_prefetch(message.prefetch)
    if kind == "close":
        return Close(_session(message.close.session_id))
    raise InvalidInput.of("target command", kind, "one of round, open, stage, close")


def encode_target_event(event: TargetEvent) -> target_pb.TargetEvent:
    """One message from the target."""
    if isinstance(event, Verdict):
        return target_pb.TargetEvent(verdict=_encode_verdict(event))
    if isinstance(event, TargetOpened):
        opened = target_pb.TargetOpened(
            session_id=event.session_id,
            reused_tokens=event.reused_tokens,
            timings=_encode_timings(event.timings),
        )
        return target_pb.TargetEvent(opened=opened)
    if isinstance(event, Features):
        return target_pb.TargetEvent(features=_encode_features(event))
    return target_pb.TargetEvent(failure=_encode_failure(event))


def decode_target_event(message: target_pb.TargetEvent) -> TargetEvent:
    """One message from the target, checked."""
    kind = message.WhichOneof("event")
    if kind == "verdict":
        return _decode_verdict(message.verdict)
    if kind == "opened":
        opened = message.opened
        return TargetOpened(_session(opened.session_id), opened.reused_tokens, _decode_timings(opened.timings))
    if kind == "failure":
        return _decode_failure(message.failure)
    if kind == "features":
        return _decode_features(message.features)
    raise InvalidInput.of("target event", kind, "one of verdict, opened, failure, features")


def _encode_target_open(command: TargetOpen) -> target_pb.TargetOpen:
    return target_pb.TargetOpen(
        session_id=command.session_id,
        token_ids=command.token_ids,
        prompt_length=command.prompt_length,
        sampling=_encode_sampling(command.sampling),
        seed=command.noise.seed,
        sample_index=command.noise.sample_index,
        acceptance=_ACCEPTANCES[command.acceptance],
        feature_layers=command.feature_layers,
        time_left_ms=command.time_left_ms,
        trace=_encode_trace(command.traceparent),
        max_length=command.max_length,
        end_token_ids=command.end_token_ids,
    )


def _decode_target_open(message: target_pb.TargetOpen) -> TargetOpen:
    return TargetOpen(
        session_id=_session(message.session_id),
        token_ids=tuple(message.token_ids),
        prompt_length=message.prompt_length,
        sampling=_decode_sampling(message.sampling),
        noise=NoiseKey(message.seed, message.sample_index),
        acceptance=_decode_acceptance(message.acceptance),
        feature_layers=_decode_layers("feature_layers", message.feature_layers),
        time_left_ms=message.time_left_ms if message.HasField("time_left_ms") else None,
        traceparent=_decode_trace(message.trace),
        max_length=message.max_length,
        end_token_ids=tuple(message.end_token_ids),
    )


def _encode_round(command: Round) -> target_pb.Round:
    return target_pb.Round(
        session_id=command.session_id,
        base_length=command.base_length,
        accepted_node=command.accepted_node,
        committed=command.committed,
        proposal=None if command.proposal is None else _encode_proposal(command.proposal),
        trace=_encode_trace(command.traceparent),
        lease=command.lease,
    )


def _decode_round(message: target_pb.Round) -> Round:
    return Round(
        session_id=_session(message.session_id),
        base_length=message.base_length,
        accepted_node=message.accepted_node,
        committed=tuple(message.committed),
        proposal=_decode_proposal(message.proposal) if message.HasField("proposal") else None,
        traceparent=_decode_trace(message.trace),
        lease=message.lease,
    )


def _encode_prefetch(command: Prefetch) -> target_pb.Prefetch:
    prefetched = (
        target_pb.PrefetchedProposal(
            node=outcome.node,
            next_token=outcome.next_token,
            token_ids=proposal.token_ids,
            parents=() if proposal.is_chain else proposal.parents,
        )
        for outcome, proposal in command.proposals
    )
    return target_pb.Prefetch(session_id=command.session_id, base_length=command.base_length, proposals=prefetched)


def _decode_prefetch(message: target_pb.Prefetch) -> Prefetch:
    count = len(message.proposals)
    require(count <= MAX_PREFETCHED, "staged proposals", count, f"at most {MAX_PREFETCHED} for one round")
    prefetched = []
    for each in message.proposals:
        require(each.node >= ROOT, "staged node", each.node, "at least -1")
        certain = (1.0,) * len(each.token_ids)
        proposal = Proposal(0, tuple(each.token_ids), certain, tuple(each.parents))
        prefetched.append((Outcome(message.base_length, each.node, each.next_token), proposal))
    return Prefetch(_session(message.session_id), message.base_length, tuple(prefetched))


def _encode_verdict(event: Verdict) -> target_pb.Verdict:
    return target_pb.Verdict(
        session_id=event.session_id,
        base_length=event.base_length,
        token_ids=event.token_ids,
        target_probabilities=event.target_probabilities,
        residual_masses=event.residual_masses,
        logprobs=[_encode_logprobs(row) for row in event.logprobs],
        timings=_encode_timings(event.timings),
        self_started=None if event.self_started is None else _encode_self_started(event.self_started),
    )


def _encode_self_started(self_started: SelfStarted) -> target_pb.SelfStarted:
    return target_pb.SelfStarted(base_length=self_started.base_length, nodes=self_started.nodes)


def _decode_verdict(message: target_pb.Verdict) -> Verdict:
    require(len(message.token_ids) >= 1, "verdict token_ids", len(message.token_ids), "at least 1 token")
    for p in message.target_probabilities:
        require(0 <= p <= 1 + PROBABILITY_SLACK, "target_probability", p, "in [0, 1]")
    for mass in message.residual_masses:
        require(0 <= mass <= 1 + PROBABILITY_SLACK, "residual_mass", mass, "in [0, 1]")
    return Verdict(
        session_id=_session(message.session_id),
        base_length=message.base_length,
        token_ids=tuple(message.token_ids),
        target_probabilities=tuple(message.target_probabilities),
        residual_masses=tuple(message.residual_masses),
        logprobs=tuple(_decode_logprobs(row) for row in message.logprobs),
        timings=_decode_timings(message.timings),
        self_started=SelfStarted(message.self_started.base_length, message.self_started.nodes)
        if message.HasField("self_started")
        else None,
    )


# --- draft link --------------------------------------------------------------


def encode_draft_command(command: DraftCommand) -> draft_pb.DraftCommand:
    """One message to the draft service."""
    if isinstance(command, Commit):
        return draft_pb.DraftCommand(commit=_encode_commit(command))
    if isinstance(command, Verifying):
        return draft_pb.DraftCommand(verifying=_encode_verifying(command))
    if isinstance(command, DraftOpen):
        return draft_pb.DraftCommand(open=_encode_draft_open(command))
    return draft_pb.DraftCommand(close=pb.Close(session_id=command.session_id))


def decode_draft_command(message: draft_pb.DraftCommand) -> DraftCommand:
    """One message to the draft service, checked."""
    kind = message.WhichOneof("command")
    if kind == "commit":
        return _decode_commit(message.commit)
    if kind == "verifying":
        return _decode_verifying(message.verifying)
    if kind == "open":
        return _decode_draft_open(message.open)
    if kind == "close":
        return Close(_session(message.close.session_id))
    raise InvalidInput.of("draft command", kind, "one of commit, verifying, open, close")


def encode_draft_event(event: DraftEvent) -> draft_pb.DraftEvent:
    """One message from the draft service."""
    if isinstance(event, DraftedProposal):
        return draft_pb.DraftEvent(proposal=_encode_drafted(event))
    if isinstance(event, DraftOpened):
        opened = draft_pb.DraftOpened(
            session_id=event.session_id,
            reused_tokens=event.reused_tokens,
            drafter=event.drafter,
            feature_layers=event.feature_layers,
        )
        return draft_pb.DraftEvent(opened=opened)
    return draft_pb.DraftEvent(failure=_encode_failure(event))


def decode_draft_event(message: draft_pb.DraftEvent) -> DraftEvent:
    """One message from the draft service, checked."""
    kind = message.WhichOneof("event")
    if kind == "proposal":
        return _decode_drafted(message.proposal)
    if kind == "opened":
        opened = message.opened
        return DraftOpened(
            session_id=_session(opened.session_id),
            drafter=opened.drafter,
            reused_tokens=opened.reused_tokens,
            feature_layers=_decode_layers("feature_layers", opened.feature_layers),
        )
    if kind == "failure":
        return _decode_failure(message.failure)
    raise InvalidInput.of("draft event", kind, "one of proposal, opened, failure")


def _encode_draft_open(command: DraftOpen) -> draft_pb.DraftOpen:
    return draft_pb.DraftOpen(
        session_id=command.session_id,
        token_ids=command.token_ids,
        prompt_length=command.prompt_length,
        sampling=_encode_sampling(command.sampling),
        seed=command.noise.seed,
        sample_index=command.noise.sample_index,
        acceptance=_ACCEPTANCES[command.acceptance],
        drafter=command.drafter,
        budget=_encode_budget(command.budget),
        time_left_ms=command.time_left_ms,
        trace=_encode_trace(command.traceparent),
        max_length=command.max_length,
        end_token_ids=command.end_token_ids,
    )


def _decode_draft_open(message: draft_pb.DraftOpen) -> DraftOpen:
    return DraftOpen(
        session_id=_session(message.session_id),
        token_ids=tuple(message.token_ids),
        prompt_length=message.prompt_length,
        sampling=_decode_sampling(message.sampling),
        noise=NoiseKey(message.seed, message.sample_index),
        acceptance=_decode_acceptance(message.acceptance),
        drafter=message.drafter,
        budget=_decode_budget(message.budget),
        time_left_ms=message.time_left_ms if message.HasField("time_left_ms") else None,
        traceparent=_decode_trace(message.trace),
        max_length=message.max_length,
        end_token_ids=tuple(message.end_token_ids),
    )


def _encode_commit(command: Commit) -> draft_pb.Commit:
    return draft_pb.Commit(
        session_id=command.session_id,
        outcome=_encode_outcome(command.outcome),
        token_ids=command.token_ids,
        committed_length=command.committed_length,
        budget=_encode_budget(command.budget),
        features=None if command.features is None else _encode_features(command.features),
        trace=_encode_trace(command.traceparent),
    )


def _decode_commit(message: draft_pb.Commit) -> Commit:
    require(message.HasField("outcome"), "commit outcome", None, "set")
    require(len(message.token_ids) >= 1, "commit token_ids", len(message.token_ids), "at least 1 token")
    return Commit(
        session_id=_session(message.session_id),
        outcome=_decode_outcome(message.outcome),
        token_ids=tuple(message.token_ids),
        committed_length=message.committed_length,
        budget=_decode_budget(message.budget),
        features=_decode_features(message.features) if message.HasField("features") else None,
        traceparent=_decode_trace(message.trace),
    )


def _encode_verifying(command: Verifying) -> draft_pb.Verifying:
    return draft_pb.Verifying(
        session_id=command.session_id,
        base_length=command.base_length,
        proposal_id=command.proposal_id,
        node_count=command.node_count,
        proposal=None if command.proposal is None else _encode_proposal(command.proposal),
        budget=_encode_budget(command.budget),
    )


def _decode_verifying(message: draft_pb.Verifying) -> Verifying:
    inline = message.HasField("proposal")
    one_way = not (inline and message.proposal_id)
    require(one_way, "verifying proposal_id", message.proposal_id, "0 when the proposal is inline")
    nodes = message.node_count
    require(nodes <= MAX_PROPOSAL_NODES, "verifying node_count", nodes, f"at most {MAX_PROPOSAL_NODES}")
    return Verifying(
        session_id=_session(message.session_id),
        base_length=message.base_length,
        proposal_id=message.proposal_id,
        node_count=nodes,
        proposal=_decode_proposal(message.proposal) if inline else None,
        budget=_decode_budget(message.budget),
    )


def _encode_drafted(event: DraftedProposal) -> draft_pb.DraftedProposal:
    return draft_pb.DraftedProposal(
        session_id=event.session_id,
        outcome=None if event.outcome is None else _encode_outcome(event.outcome),
        proposal=_encode_proposal(event.proposal),
        timings=_encode_timings(event.timings),
    )


def _decode_drafted(message: draft_pb.DraftedProposal) -> DraftedProposal:
    require(message.HasField("proposal"), "drafted proposal", None, "set (it may be empty)")
    return _ReceivedProposal(message)


class _ReceivedProposal(DraftedProposal):
    """Decodes its proposal when that is looked at: one of the many drafted for a round's outcomes is.

    Reading `proposal` or `timings` raises `InvalidInput` if they are malformed.
    """

    def __init__(self, message: draft_pb.DraftedProposal) -> None:
        facts = self.__dict__  # the dataclass is frozen
        facts["session_id"] = _session(message.session_id)
        facts["outcome"] = _decode_outcome(message.outcome) if message.HasField("outcome") else None
        facts["_message"] = message

    @cached_property
    def proposal(self) -> Proposal:
        return _decode_proposal(self.__dict__["_message"].proposal)

    @cached_property
    def timings(self) -> StepTimings:
        return _decode_timings(self.__dict__["_message"].timings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftedProposal) and _facts_of(self) == _facts_of(other)

    def __hash__(self) -> int:
        return hash(_facts_of(self))


def _facts_of(drafted: DraftedProposal) -> tuple[object, ...]:
    return drafted.session_id, drafted.outcome, drafted.proposal, drafted.timings


def _encode_budget(budget: DraftBudget) -> draft_pb.DraftBudget:
    return draft_pb.DraftBudget(
        max_tokens=budget.max_tokens,
        tree_widths=budget.tree_widths,
        max_nodes=budget.max_nodes,
        fan_out=budget.fan_out,
        deadline_ms=budget.deadline_ms,
    )


def _decode_budget(message: draft_pb.DraftBudget) -> DraftBudget:
    nodes = f"at most {MAX_PROPOSAL_NODES}"
    require(message.max_tokens <= MAX_PROPOSAL_NODES, "budget max_tokens", message.max_tokens, nodes)
    require(message.max_nodes <= MAX_PROPOSAL_NODES, "budget max_nodes", message.max_nodes, nodes)
    require(message.fan_out <= MAX_FAN_OUT, "budget fan_out", message.fan_out, f"at most {MAX_FAN_OUT}")
    _check_widths(message.tree_widths)
    return DraftBudget(
        max_tokens=message.max_tokens,
        tree_widths=tuple(message.tree_widths),
        max_nodes=message.max_nodes,
        fan_out=message.fan_out,
        deadline_ms=message.deadline_ms if message.HasField("deadline_ms") else None,
    )


# --- generation --------------------------------------------------------------


def encode_generate_request(request: GenerateRequest) -> generation_pb.GenerateRequest:
    """A client's request; raises `InvalidInput` for what the wire can't hold."""
    _check_ids("token_ids", request.token_ids)
    _check_ids("resume_token_ids", request.resume_token_ids)
    _check_ids("max_new_tokens", () if request.max_new_tokens is None else (request.max_new_tokens,))
    for name, text in _texts(request):
        _check_text(name, text)
    message = generation_pb.GenerateRequest(
        model=request.model,
        sampling=_encode_sampling(request.sampling),
        seed=request.seed,
        max_new_tokens=request.max_new_tokens,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        acceptance=_ACCEPTANCES[request.acceptance],
        speculation=_encode_speculation(request.speculation),
        resume_token_ids=request.resume_token_ids,
        sample_index=request.sample_index,
    )
    if request.prompt is not None:
        message.prompt = request.prompt
    elif request.messages:
        message.chat.messages.extend(
            generation_pb.ChatMessage(role=chat.role, content=chat.content) for chat in request.messages
        )
    else:
        message.tokens.token_ids.extend(request.token_ids)
    return message


def decode_generate_request(message: generation_pb.GenerateRequest) -> GenerateRequest:
    """A client's request, checked as far as it can be without the model."""
    _check_known("generate request", message)
    kind = message.WhichOneof("input")
    require(kind is not None, "input", kind, "one of prompt, chat, tokens")
    chat, token_ids = message.chat.messages, message.tokens.token_ids
    require(kind != "chat" or len(chat) >= 1, "chat messages", len(chat), "at least 1")
    require(kind != "tokens" or len(token_ids) >= 1, "token_ids", len(token_ids), "at least 1 token")
    return GenerateRequest(
        prompt=message.prompt if kind == "prompt" else None,
        messages=tuple(ChatMessage(item.role, item.content) for item in chat),
        token_ids=tuple(token_ids),
        model=message.model,
        sampling=_decode_sampling(message.sampling),
        seed=message.seed if message.HasField("seed") else None,
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else None,
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
        acceptance=_decode_acceptance(message.acceptance or pb.ACCEPTANCE_COUPLED),
        speculation=_decode_speculation(message.speculation),
        resume_token_ids=tuple(message.resume_token_ids),
        sample_index=message.sample_index,
    )


def encode_generate_event(event: GenerateEvent) -> generation_pb.GenerateResponse:
    """One message of a generation."""
    if isinstance(event, Tokens):
        tokens = generation_pb.GeneratedTokens(
            token_ids=event.token_ids,
            text=event.text,
            provenance=[_PROVENANCES[provenance] for provenance in event.provenance],
            logprobs=[_encode_logprobs(row) for row in event.logprobs],
            text_ends=event.text_ends,
        )
        return generation_pb.GenerateResponse(tokens=tokens)
    if isinstance(event, Started):
        started = generation_pb.GenerationStarted(
            seed=event.seed, prompt_token_ids=event.prompt_token_ids, model=event.model
        )
        return generation_pb.GenerateResponse(started=started)
    finished = generation_pb.GenerationFinished(
        reason=_FINISH_REASONS[event.reason], text=event.text, stats=_encode_stats(event.stats)
    )
    return generation_pb.GenerateResponse(finished=finished)


def decode_generate_event(message: generation_pb.GenerateResponse) -> GenerateEvent:
    """One message of a generation, checked."""
    kind = message.WhichOneof("event")
    if kind == "tokens":
        return _decode_tokens(message.tokens)
    if kind == "started":
        started = message.started
        return Started(started.seed, tuple(started.prompt_token_ids), started.model)
    if kind == "finished":
        finished = message.finished
        reason = _decode_enum("finish reason", finished.reason, _FINISH_REASONS)
        return Finished(reason, finished.text, _decode_stats(finished.stats))
    raise InvalidInput.of("generate event", kind, "one of started, tokens, finished")


def _decode_tokens(message: generation_pb.GeneratedTokens) -> Tokens:
    tokens = Tokens(
        token_ids=tuple(message.token_ids),
        text=message.text,
        provenance=tuple(_decode_enum("provenance", value, _PROVENANCES) for value in message.provenance),
        logprobs=tuple(_decode_logprobs(row) for row in message.logprobs),
        text_ends=tuple(message.text_ends),
    )
    count = len(tokens.token_ids)
    ends = len(tokens.text_ends)
    require(ends in (0, count), "text_ends", ends, f"0 or {count}, one for each token")
    require(len(tokens.provenance) == count, "provenance", len(tokens.provenance), f"{count}, one for each token")
    rows = len(tokens.logprobs)
    require(rows in (0, count), "logprobs rows", rows, f"0 or {count}, one for each token")
    return tokens


def _encode_speculation(settings: SpeculationSettings) -> generation_pb.SpeculationSettings:
    return generation_pb.SpeculationSettings(
        off=settings.off,
        drafter=settings.drafter,
        num_draft_tokens=settings.num_draft_tokens,
        tree_widths=settings.tree_widths,
    )


def _decode_speculation(message: generation_pb.SpeculationSettings) -> SpeculationSettings:
    _check_widths(message.tree_widths)
    return SpeculationSettings(
        off=message.off,
        drafter=message.drafter,
        num_draft_tokens=message.num_draft_tokens if message.HasField("num_draft_tokens") else None,
        tree_widths=tuple(message.tree_widths),
    )


def _encode_stats(stats: GenerationStats) -> generation_pb.GenerationStats:
    return generation_pb.GenerationStats(
        rounds=stats.rounds,
        committed=stats.committed,
        cache_hits=stats.cache_hits,
        cache_misses=stats.cache_misses,
        time_to_first_token_ms=stats.time_to_first_token_ms,
        tokens_per_second=stats.tokens_per_second,
        verify_ms_p50=stats.verify_ms_p50,
        draft_wait_ms_p50=stats.draft_wait_ms_p50,
        num_spec_steps=stats.num_spec_steps,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
        acceptance_histogram=stats.acceptance_histogram,
        num_spec_tokens=stats.num_spec_tokens,
        records=[_encode_record(record) for record in stats.records],
    )


def _decode_stats(message: generation_pb.GenerationStats) -> GenerationStats:
    return GenerationStats(
        rounds=message.rounds,
        committed=message.committed,
        cache_hits=message.cache_hits,
        cache_misses=message.cache_misses,
        time_to_first_token_ms=message.time_to_first_token_ms,
        tokens_per_second=message.tokens_per_second,
        verify_ms_p50=message.verify_ms_p50,
        draft_wait_ms_p50=message.draft_wait_ms_p50,
        num_spec_steps=message.num_spec_steps,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_draft_tokens=message.num_accepted_draft_tokens,
        acceptance_histogram=tuple(message.acceptance_histogram),
        num_spec_tokens=message.num_spec_tokens,
        records=tuple(_decode_record(record) for record in message.records),
    )


def _encode_record(record: RoundRecord) -> generation_pb.RoundRecord:
    return generation_pb.RoundRecord(
        base_length=record.base_length,
        round_ms=record.round_ms,
        draft_wait_ms=record.draft_wait_ms,
        wire_ms=record.wire_ms,
        target=_encode_timings(record.target),
        accept_ms=record.accept_ms,
        proposed=record.proposed,
        accepted=record.accepted,
        cache_hit=record.cache_hit,
        cache_miss=record.cache_miss,
        drafter=record.drafter,
        draft=_encode_timings(record.draft),
        self_started=record.self_started,
    )


def _decode_record(message: generation_pb.RoundRecord) -> RoundRecord:
    return RoundRecord(
        base_length=message.base_length,
        round_ms=message.round_ms,
        draft_wait_ms=message.draft_wait_ms,
        wire_ms=message.wire_ms,
        target=_decode_timings(message.target),
        accept_ms=message.accept_ms,
        proposed=message.proposed,
        accepted=message.accepted,
        cache_hit=message.cache_hit,
        cache_miss=message.cache_miss,
        drafter=message.drafter,
        draft=_decode_timings(message.draft),
        self_started=message.self_started,
    )


# --- status ------------------------------------------------------------------


def encode_service_status(status: ServiceStatus) -> pb.ServiceStatus:
    """What a service is doing."""
    return pb.ServiceStatus(
        incarnation=status.incarnation,
        fingerprint=encode_fingerprint(status.fingerprint),
        sessions=status.sessions,
        kv_rows=status.kv_rows,
        max_kv_rows=status.max_kv_rows,
        queue_length=status.queue_length,
        steps=status.steps,
        resident_bytes=status.resident_bytes,
        frames_sent=status.frames_sent,
    )


def decode_service_status(message: pb.ServiceStatus) -> ServiceStatus:
    """Inverse of `encode_service_status`."""
    return ServiceStatus(
        incarnation=message.incarnation,
        fingerprint=decode_fingerprint(message.fingerprint),
        sessions=message.sessions,
        kv_rows=message.kv_rows,
        max_kv_rows=message.max_kv_rows,
        queue_length=message.queue_length,
        steps=message.steps,
        resident_bytes=message.resident_bytes,
        frames_sent=message.frames_sent,
    )


def encode_model_description(description: ModelDescription) -> generation_pb.ModelDescription:
    """A served model."""
    return generation_pb.ModelDescription(
        name=description.name,
        target=encode_fingerprint(description.target),
        draft=encode_fingerprint(description.draft),
        max_length=description.max_length,
        drafters=description.drafters,
        target_ready=description.target_ready,
        draft_ready=description.draft_ready,
    )


def decode_model_description(message: generation_pb.ModelDescription) -> ModelDescription:
    """Inverse of `encode_model_description`."""
    return ModelDescription(
        name=message.name,
        target=decode_fingerprint(message.target),
        draft=decode_fingerprint(message.draft),
        max_length=message.max_length,
        drafters=tuple(message.drafters),
        target_ready=message.target_ready,
        draft_ready=message.draft_ready,
    )


# --- trace context -----------------------------------------------------------


def decode_traceparent(value: str) -> str:
    """A `traceparent` as W3C Trace Context has it; empty if it is not valid, as if none had come.

    A later version is rewritten to what version 00 knows of it.
    """
    found = _TRACEPARENT.fullmatch(value)
    if found is None or (found["version"] == "00" and found["more"] is not None):
        return ""
    return f"00{found['fields']}"


# --- failures ----------------------------------------------------------------


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


def _encode_failure(event: Failure) -> pb.Failure:
    return pb.Failure(
        session_id=event.session_id,
        code=event.code,
        reason=event.reason,
        message=event.message,
        metadata=dict(event.metadata),
        retry_after_ms=event.retry_after_ms,
        retry_safe=event.retry_safe,
        session_closed=event.session_closed,
    )


def _decode_failure(message: pb.Failure) -> Failure:
    """Session 0 is allowed here: it answers a message that named no session."""
    known = message.code in {int(code) for code in Code}
    return Failure(
        session_id=message.session_id,
        code=message.code if known else int(Code.INTERNAL),
        reason=message.reason,
        message=message.message,
        metadata=dict(message.metadata),
        retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
        retry_safe=message.retry_safe,
        session_closed=message.session_closed,
    )


# --- parts -------------------------------------------------------------------


def _encode_sampling(params: SamplingParams) -> pb.SamplingParams:
    require(params.top_k <= MAX_UINT32, "top_k", params.top_k, f"at most {MAX_UINT32}")
    _check_ids("min_tokens", (params.min_tokens,))
    _check_ids("logit_bias id", (token_id for token_id, _ in params.logit_bias))
    for word in params.bad_words:
        _check_ids("bad_words id", word)
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        logprobs=params.logprobs,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        bad_words=[pb.TokenSequence(token_ids=word) for word in params.bad_words],
        min_tokens=params.min_tokens,
        grammar=None if params.grammar is None else _encode_grammar(params.grammar),
    )


def _decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    _check_known("sampling", message)
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(message.logit_bias.items()),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        min_tokens=message.min_tokens,
        grammar=_decode_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def _encode_grammar(grammar: Grammar) -> pb.Grammar:
    _check_text(grammar.kind.value, grammar.text)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return pb.Grammar(json_schema=grammar.text)
    if grammar.kind is GrammarKind.REGEX:
        return pb.Grammar(regex=grammar.text)
    return pb.Grammar(lark=grammar.text)


def _decode_grammar(message: pb.Grammar) -> Grammar:
    _check_known("grammar", message)
    kind = message.WhichOneof("language")
    if kind is None:
        raise InvalidInput.of("grammar", kind, f"one of {', '.join(kind.value for kind in GrammarKind)}")
    return Grammar(GrammarKind(kind), getattr(message, kind))


def _encode_proposal(proposal: Proposal) -> pb.Proposal:
    return pb.Proposal(
        proposal_id=proposal.proposal_id,
        token_ids=proposal.token_ids,
        parents=() if proposal.is_chain else proposal.parents,
        draft_probabilities=proposal.draft_probabilities,
        supports=[
            pb.SparseDistribution(token_ids=support.token_ids, probabilities=support.probabilities)
            for support in proposal.supports
        ],
        drafter=proposal.drafter,
    )


def _decode_proposal(message: pb.Proposal) -> Proposal:
    require(message.proposal_id >= 1, "proposal_id", message.proposal_id, "at least 1")
    nodes = len(message.token_ids)
    require(nodes <= MAX_PROPOSAL_NODES, "proposal nodes", nodes, f"at most {MAX_PROPOSAL_NODES}")
    size = len(message.drafter.encode())
    require(size <= MAX_DRAFTER_BYTES, "proposal drafter bytes", size, f"at most {MAX_DRAFTER_BYTES}")
    return Proposal(
        proposal_id=message.proposal_id,
        token_ids=tuple(message.token_ids),
        draft_probabilities=tuple(message.draft_probabilities),
        parents=tuple(message.parents),
        supports=tuple(
            SparseDistribution(tuple(support.token_ids), tuple(support.probabilities)) for support in message.supports
        ),
        drafter=message.drafter,
    )


def _encode_outcome(outcome: Outcome) -> pb.Outcome:
    return pb.Outcome(base_length=outcome.base_length, node=outcome.node, next_token=outcome.next_token)


def _decode_outcome(message: pb.Outcome) -> Outcome:
    in_range = -1 <= message.node < MAX_PROPOSAL_NODES
    require(in_range, "outcome node", message.node, f"in [-1, {MAX_PROPOSAL_NODES - 1}]")
    return Outcome(message.base_length, message.node, message.next_token)


def _encode_timings(timings: StepTimings) -> target_pb.StepTimings:
    return target_pb.StepTimings(
        queue_ms=timings.queue_ms,
        forward_ms=timings.forward_ms,
        sample_ms=timings.sample_ms,
        service_ms=timings.service_ms,
        rows=timings.rows,
        sessions=timings.sessions,
    )


def _decode_timings(message: target_pb.StepTimings) -> StepTimings:
    for field in ("queue_ms", "forward_ms", "sample_ms", "service_ms"):
        value = getattr(message, field)
        require(math.isfinite(value) and value >= 0, f"timings {field}", value, "finite and at least 0")
    return StepTimings(
        queue_ms=message.queue_ms,
        forward_ms=message.forward_ms,
        sample_ms=message.sample_ms,
        service_ms=message.service_ms,
        rows=message.rows,
        sessions=message.sessions,
    )


def _encode_logprobs(row: RowLogprobs) -> target_pb.RowLogprobs:
    return target_pb.RowLogprobs(token_ids=row.token_ids, logprobs=row.logprobs)


def _decode_logprobs(message: target_pb.RowLogprobs) -> RowLogprobs:
    ids = len(message.token_ids)
    require(len(message.logprobs) == ids, "row logprobs", len(message.logprobs), f"{ids}, one for each id")
    return RowLogprobs(tuple(message.token_ids), tuple(message.logprobs))


def _encode_features(features: Features) -> pb.Features:
    return pb.Features(
        session_id=features.session_id,
        first_position=features.first_position,
        dtype=features.dtype,
        shape=features.shape,
        layer_ids=features.layer_ids,
        data=features.data,
    )


def _decode_features(message: pb.Features) -> Features:
    require(message.dtype in _ELEMENT_BYTES, "features dtype", message.dtype, "float32, bfloat16 or float16")
    require(len(message.shape) == 3, "features shape", tuple(message.shape), "[rows, layers, hidden]")
    rows, layers, hidden = message.shape
    layer_ids = _decode_layers("features layer_ids", message.layer_ids)
    require(len(layer_ids) == layers, "features layer_ids", layer_ids, f"{layers}, one for each layer of the shape")
    size = rows * layers * hidden * _ELEMENT_BYTES[message.dtype]
    require(len(message.data) == size, "features bytes", len(message.data), f"{size}, shape times element size")
    return Features(
        session_id=_session(message.session_id),
        first_position=message.first_position,
        dtype=message.dtype,
        shape=(rows, layers, hidden),
        layer_ids=layer_ids,
        data=message.data,
    )


def _encode_trace(traceparent: str) -> pb.TraceContext | None:
    return pb.TraceContext(traceparent=traceparent) if traceparent else None


def _decode_trace(message: pb.TraceContext) -> str:
    return decode_traceparent(message.traceparent)


def _decode_acceptance(value: int) -> Acceptance:
    return _decode_enum("acceptance", value, _ACCEPTANCES)


def _decode_enum(name: str, value: int, numbers: Mapping[Domain, int]) -> Domain:
    for member, number in numbers.items():
        if number == value:
            return member
    raise InvalidInput.of(name, value, f"one of {sorted(numbers.values())}")


def _decode_layers(name: str, layers: Sequence[int]) -> tuple[int, ...]:
    require(len(layers) <= MAX_FEATURE_LAYERS, name, len(layers), f"at most {MAX_FEATURE_LAYERS} layers")
    return tuple(layers)


def _session(session_id: int) -> int:
    require(session_id >= 1, "session_id", session_id, "at least 1")
    return session_id


def _check_widths(widths: Sequence[int]) -> None:
    require(len(widths) <= MAX_PROPOSAL_NODES, "tree_widths", len(widths), f"at most {MAX_PROPOSAL_NODES} depths")
    for width in widths:
        require(1 <= width <= MAX_PROPOSAL_NODES, "tree_widths", width, f"in [1, {MAX_PROPOSAL_NODES}] at each depth")


def _check_known(name: str, message: Message) -> None:
    """A parameter that this version doesn't know is refused: ignored, it would change the text unnoticed."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise Unsupported(f"{name} field number {unknown[0].field_number}: this version has no such parameter")


def _check_ids(name: str, ids: Iterable[int]) -> None:
    for token_id in ids:
        require(0 <= token_id <= MAX_UINT32, name, token_id, f"in [0, {MAX_UINT32}]")


def _texts(request: GenerateRequest) -> Iterable[tuple[str, str]]:
    yield "model", request.model
    yield "prompt", request.prompt or ""
    yield "drafter", request.speculation.drafter
    yield from (("stop", stop) for stop in request.stop)
    yield from (("content", message.content) for message in request.messages)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput.of(name, text, "valid Unicode (no lone surrogates)") from error
