"""GenerationService: a request in, a stream of text out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc

from coordinator.drafting.drafting import Drafting
from coordinator.drafting.explaining import group_report
from coordinator.drafting.settings import DraftingSettings
from coordinator.observer import RequestObserver
from coordinator.policy.planner import Planner
from coordinator.prepare import ServedModel, prepare
from coordinator.recorder import RequestRecorder
from coordinator.round import run_rounds
from coordinator.sessions.target import TargetSession
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from coordinator.stats import StatsBuilder
from coordinator.text.library import Library
from coordinator.text.outbox import Outbox
from coordinator.text.sequence import GenerationTask, Sequence
from paceline.access.gate import Caller, Gate
from paceline.access.places import RunningPlaces
from paceline.costs.cost_line import CostLine
from paceline.drafting.draft_pool import DraftPeer, DraftPool
from paceline.models.generation_defaults import NO_DEFAULTS, GenerationDefaults
from paceline.models.prompts import PromptReader
from paceline.models.reasoning import reasoning_marks
from paceline.models.tokenizer import Tokenizer
from paceline.protocol import codec
from paceline.protocol.errors import InternalError
from paceline.protocol.explanation import GroupReport
from paceline.protocol.features import FeatureType
from paceline.protocol.generation import (
    MAX_PEERS,
    Finished,
    GenerateEvent,
    GenerateRequest,
    ModelDescription,
    PeerDescription,
    PeerKind,
    Started,
)
from paceline.protocol.handshake import Fingerprint, Welcome
from paceline.protocol.proposal import AUTO, NGRAM, NONE, Acceptance
from paceline.rpc.frames import first_to_end
from paceline.rpc.statuses import typed_errors
from paceline.runtime import clock, genai, metrics, telemetry
from paceline.runtime.config import CoordinatorConfig
from paceline.runtime.telemetry import RequestTrace
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 500
PATIENT_SHARE = 0.9
"""Share of a request's time that it waits for the target's link."""
Write = Callable[[GenerateEvent], Any]


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Runs each request's rounds on the shared links."""

    def __init__(
        self,
        config: CoordinatorConfig,
        tokenizer: Tokenizer,
        target: TargetPool,
        draft: DraftPool | None,
        gate: Gate,
        library: Library | None = None,
        defaults: GenerationDefaults = NO_DEFAULTS,
    ) -> None:
        self._config = config
        self._gate = gate
        self._defaults = defaults
        self._prompts = PromptReader(tokenizer)
        self._model = config.served_model_name or config.model
        self._drafting = DraftingSettings(
            config.drafter,
            config.num_draft_tokens,
            config.fan_out,
            config.lease,
            config.max_prefetched,
            FeatureType(config.feature_dtype),
            config.max_feature_bytes,
        )
        self._tokenizer = tokenizer
        self._marks = reasoning_marks(tokenizer)
        self._target = target
        self._draft = draft
        self._planner = Planner()
        self._library = library or Library()
        metrics.watch_groups(self._groups)
        self._places = RunningPlaces("max_concurrent_requests", config.max_concurrent_requests, RETRY_AFTER_MS)

    @typed_errors
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: N802
        """Stream one generation; cancelling it frees both services' sessions."""
        log_tokenizer = self._tokenizer if self._config.log_prompts else None
        with RequestObserver(_metadata(context, "x-request-id"), log_tokenizer) as observer:
            caller = self._gate.authenticate(_metadata(context, "authorization"))
            async with self._places.place(caller.tenant):
                with caller.request():
                    generating = self._generate(request, context, caller, observer)
                    await first_to_end(generating, caller.until_revoked())

    @typed_errors
    async def DescribeModels(  # noqa: N802
        self, request: pb.DescribeModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeModelsResponse:
        """Describe the model and the peers that are up. It needs a key as `Generate` does; it counts for no limit."""
        caller = self._gate.authenticate(_metadata(context, "authorization"))
        description = describe(self._served_model(), self._target, self._draft, dict(self._groups()), caller.tenant)
        return pb.DescribeModelsResponse(models=[codec.encode_model_description(description)])

    async def _generate(
        self,
        message: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        caller: Caller,
        observer: RequestObserver,
    ) -> None:
        request = codec.decode_generate_request(message)
        request = replace(request, sampling=request.sampling.with_defaults(self._defaults.sampling))
        with self._trace(request, context) as trace, observer.in_trace(trace.traceparent):
            chat = bool(request.messages)
            await self._target.wait_up(_patience_s(context, self._target.wait_s))
            model = self._served_model()
            request = await self._prompts.tokenise(request, model.max_length)
            task = prepare(request, model, deadline=_deadline(context), tenant=caller.tenant)
            caller.take_prompt(len(task.prompt) + len(task.resume_token_ids))
            observer.begin(task, chat=chat)

            async def write(event: GenerateEvent) -> None:
                await context.write(codec.encode_generate_event(event))

            await self._stream(task, write, caller, observer, trace)

    def _trace(self, request: GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> RequestTrace:
        headers = {name: _metadata(context, name) for name in ("traceparent", "tracestate")}
        name = genai.span_name(genai.operation_of(request), self._model)
        return telemetry.start_request(name, headers, genai.request_attributes(request, self._model))

    async def _stream(
        self, task: GenerationTask, write: Write, caller: Caller, observer: RequestObserver, trace: RequestTrace
    ) -> None:
        sequence = Sequence(task, self._tokenizer, self._marks)
        recorder = RequestRecorder(self._config.record_to, task.noise.seed, len(task.prompt))
        drafting = Drafting(
            task, sequence, self._draft, self._planner, self._drafting, recorder, self._library, self._target.welcomes
        )
        target = TargetSession(self._target, task, drafting.features)
        stats = StatsBuilder(observer.arrived_at)

        def free() -> None:
            recorder.take_lines(alone=target.costs.alone, beside=target.costs.beside)
            target.close()
            drafting.close()
            recorder.close()

        async def rounds(outbox: Outbox) -> None:
            await run_rounds(task, sequence, target, drafting, outbox, stats, trace, observer)
            await outbox.drain()

        try:
            await write(Started(task.noise.seed, task.prompt, self._model, task.sampling.numbers))
            outbox = Outbox(write, free, caller.take_generated)
            await first_to_end(outbox.run(), rounds(outbox))
        finally:
            free()
        if sequence.finish_reason is None:
            raise InternalError("the rounds ended before the text did")
        if task.acceptance is Acceptance.COUPLED:  # the noise of others may come again (`exactness` §1a)
            self._library.keep(task.tenant, sequence.ids[len(task.prompt) :])
        explanation = drafting.explain(stats.records) if task.speculation.explain else None
        summary = stats.build(explanation, target.cached_prompt_tokens, target.features.total)
        last_event = Finished(sequence.finish_reason, sequence.flush(), summary)
        trace.describe(genai.response_attributes(last_event, self._model, len(task.prompt)))
        # A client may leave with its last message, which cancels what follows here.
        trace.end()
        plans = drafting.explain(stats.records) if observer.explains else None
        observer.done(summary, sequence.finish_reason.value, plans)
        await write(last_event)

    def close(self) -> None:
        """Let go of the threads that read prompts."""
        self._prompts.close()

    def _groups(self) -> Iterator[tuple[str, GroupReport]]:
        """What the requests do together at each target that they have shared, by its address."""
        for peer in self._target.peers:
            if (group := group_report(self._planner.targets.get(peer))) is not None:
                yield peer.link.address, group

    def _served_model(self) -> ServedModel:
        drafts = [peer.link.welcome for peer in self._draft.peers] if self._draft else []
        return ServedModel(
            name=self._model,
            tokenizer=self._tokenizer,
            max_length=min((welcome.max_length for welcome in self._target.welcomes), default=0),
            drafters=self._drafters([name for welcome in drafts if welcome for name in welcome.drafter_names]),
            knows_drafters=None not in drafts,
            seed=self._config.seed,
            defaults=self._defaults,
            reports_prompts=any(welcome.reports_prompts for welcome in self._target.welcomes),
        )

    def _drafters(self, of_services: Iterable[str]) -> tuple[str, ...]:
        """Names that requests may use, the default first."""
        default = self._config.drafter
        names = ((default,) if default != NONE else ()) + (AUTO, NGRAM) + tuple(of_services)
        return tuple(dict.fromkeys(names))


def _deadline(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else clock.now() + remaining_s


def _patience_s(context: grpc.aio.ServicerContext[Any, Any], longest_s: float) -> float:
    """How long a request may wait for the target, in seconds: its error must still reach the client in time."""
    remaining_s = context.time_remaining()
    return longest_s if remaining_s is None else min(longest_s, PATIENT_SHARE * remaining_s)


def _metadata(context: grpc.aio.ServicerContext[Any, Any], key: str) -> str:
    """The client's metadata under a key; empty: it sent none."""
    value = dict(context.invocation_metadata() or ()).get(key, "")
    return value if isinstance(value, str) else value.decode("ascii", "replace")


def describe(
    model: ServedModel,
    targets: TargetPool,
    drafts: DraftPool | None,
    groups: Mapping[str, GroupReport],
    tenant: str = "",
) -> ModelDescription:
    """Describe the served model and the peers that take new sessions, for a caller of this tenant.

    `groups`: what requests do together at targets, by their addresses.
    """
    return ModelDescription(
        name=model.name,
        target=_fingerprint(targets.welcomes),
        draft=_fingerprint(drafts.welcomes if drafts else ()),
        max_length=model.max_length,
        drafters=model.drafters,
        target_ready=targets.is_up,
        draft_ready=drafts is not None and drafts.is_up,
        peers=tuple(_peers(targets, drafts, groups))[:MAX_PEERS],
        sampling=model.defaults.sampling,
        max_new_tokens=model.defaults.max_new_tokens,
        tenant=tenant,
    )


def _fingerprint(welcomes: tuple[Welcome, ...]) -> Fingerprint:
    return welcomes[0].fingerprint if welcomes else Fingerprint()


def _peers(
    targets: TargetPool, drafts: DraftPool | None, groups: Mapping[str, GroupReport]
) -> Iterator[PeerDescription]:
    for peer in targets.peers:
        yield _peer(PeerKind.TARGET, peer, peer.costs.alone, groups.get(peer.link.address))
    if drafts is not None:
        yield from (_peer(PeerKind.DRAFT, peer, peer.costs.line) for peer in drafts.peers)


def _peer(
    kind: PeerKind, peer: TargetPeer | DraftPeer, line: CostLine, group: GroupReport | None = None
) -> PeerDescription:
    link, costs = peer.link, peer.costs
    return PeerDescription(
        kind=kind,
        address=link.address,
        up=link.is_up,
        problem="" if link.is_up else link.why_down().message,
        fingerprint=link.welcome.fingerprint if link.welcome else Fingerprint(),
        sessions=peer.sessions,
        step_sessions=costs.sessions,
        step_rows=costs.rows,
        queue=costs.queue,
        step_ms=line.ms(1) if line.is_known else 0.0,
        group=group,
    )
