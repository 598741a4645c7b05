"""Running services over gRPC: streams of mutated frames to target and draft, mutated requests to the coordinator."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from paceline.protocol import codec
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.rpc.statuses import from_rpc_error
from paceline.v1 import generation_service_pb2 as generation_pb
from tests.e2e.cluster import Cluster
from tests.fuzz.byte_mutations import mutated_bytes
from tests.fuzz.cases import ACCEPTED, FuzzCase, Untyped, typed
from tests.fuzz.corpus import parts_of_messages, stored_messages
from tests.fuzz.link_scripts import FuzzedLink, failure_reasons
from tests.fuzz.message_mutations import mutated_message
from tests.fuzz.running_services import WatchedServices, until_linked

MODEL = "table:vocab=32,seed=3,max_length=256"
"""That of `tests.services.harness`, whose text is known."""
BYTES_MODEL = "table:vocab=300,seed=1,max_length=96"
"""It has an end token, so that grammars are followed, and short texts, so that no request is long."""
ANSWER_S = 0.004
"""What a script waits for an answer before it goes on: those that come take half of it."""
STREAM_S = 20.0
PROMPT = (97, 98, 99)
SHORT = GenerateRequest(token_ids=PROMPT, max_new_tokens=6, seed=3)
OFF = SpeculationSettings(off=True)
REQUESTS: Sequence[GenerateRequest] = (
    SHORT,
    GenerateRequest(prompt="abc", max_new_tokens=8, stop=("x", "yz"), ignore_eos=True, seed=1),
    GenerateRequest(messages=(ChatMessage("system", "a"), ChatMessage("user", "b")), max_new_tokens=4),
    GenerateRequest(token_ids=PROMPT, max_new_tokens=12, seed=9, resume_token_ids=(5, 6), speculation=OFF),
    GenerateRequest(
        prompt="a" * 40,
        max_new_tokens=12,
        acceptance=Acceptance.BLOCK,
        speculation=SpeculationSettings(drafter="model", num_draft_tokens=3, explain=True, report_rounds=True),
    ),
    GenerateRequest(
        prompt="ab",
        max_new_tokens=9,
        prompt_logprobs=2,
        sampling=SamplingParams(logprobs=3, top_k=5),
        prediction=(1, 2),
    ),
    GenerateRequest(
        prompt="ab", max_new_tokens=9, sampling=SamplingParams(grammar=Grammar(GrammarKind.REGEX, "[a-f]+"))
    ),
    GenerateRequest(
        prompt="ab",
        max_new_tokens=9,
        sampling=SamplingParams(repetition_penalty=1.2, logit_bias=((7, 3.0),), bad_words=((8, 9),), min_tokens=2),
        speculation=SpeculationSettings(drafter="model", num_draft_tokens=2, tree_widths=(2, 2)),
    ),
)


@dataclass
class StreamTarget:
    """One service of a running cluster, given streams of frames."""

    watched: WatchedServices
    channel: grpc.aio.Channel
    link: FuzzedLink

    async def run(self, case: FuzzCase) -> str:
        kind, _ = await self._streamed(self.link.mutated_script(case.rng))
        self.watched.check()
        return kind

    async def probe(self) -> None:
        kind, events = await self._streamed(self.link.probe_frames, is_probe=True)
        assert kind == ACCEPTED, kind
        self.link.check_answer(events)
        await self.watched.check_held()

    def facts(self) -> dict[str, str]:
        return self.watched.facts()

    async def _streamed(self, frames: Sequence[bytes], *, is_probe: bool = False) -> tuple[str, list[Any]]:
        """Send a stream and end it; what was answered, and with which reason it was refused, if it was."""
        response: Any = self.link.kind.response
        call: Any = self.channel.stream_stream(self.link.path, None, response.FromString)(timeout=STREAM_S)
        events: list[Any] = []
        reader = asyncio.create_task(self._read(call, events))
        try:
            await self._write(call, frames, events, is_probe)
            reason = await reader
        finally:
            call.cancel()
            reader.cancel()
        return reason or next(iter(failure_reasons(events)), ACCEPTED), events

    async def _write(self, call: Any, frames: Sequence[bytes], events: list[Any], is_probe: bool) -> None:
        try:
            for frame in frames:
                before = len(events)
                await call.write(frame)
                await _more_than(before, events)
            if is_probe:
                await _soon(lambda: self.link.is_answered(events), STREAM_S)
            await call.done_writing()
        except (grpc.aio.UsageError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return  # refused before the last frame: the reader says why

    async def _read(self, call: Any, events: list[Any]) -> str:
        try:
            async for frame in call:
                events += [self.link.kind.events.decode(event) for event in frame.events]
        except grpc.aio.AioRpcError as error:
            return _reason(error)
        return ""


async def _more_than(before: int, events: list[Any]) -> None:
    await _soon(lambda: len(events) > before, ANSWER_S)


async def _soon(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, but no longer."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not condition() and loop.time() < until:  # noqa: ASYNC110  any condition
        await asyncio.sleep(0.0005)


def _reason(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise Untyped(f"no end within {STREAM_S:g} s")
    return typed(from_rpc_error(error))


@dataclass
class CoordinatorTarget:
    """A running coordinator, given requests."""

    watched: WatchedServices
    channel: grpc.aio.Channel
    expected: tuple[int, ...] = ()

    async def run(self, case: FuzzCase) -> str:
        kind, _ = await self._generated(mutated_request(case.rng))
        self.watched.check()
        return kind

    async def probe(self) -> None:
        wire = codec.encode_generate_request(SHORT).SerializeToString()
        kind, tokens = await self._generated(wire)
        assert kind == ACCEPTED, kind
        self.expected = self.expected or tuple(tokens)
        assert tuple(tokens) == self.expected, "the same text as before all cases"
        await self.watched.check_held()

    def facts(self) -> dict[str, str]:
        return self.watched.facts()

    async def _generated(self, wire: bytes) -> tuple[str, list[int]]:
        method = "/paceline.v1.GenerationService/Generate"
        read = generation_pb.GenerateResponse.FromString
        start: Any = self.channel.unary_stream(method, None, read)
        call = start(wire, timeout=STREAM_S)
        tokens: list[int] = []
        try:
            async for response in call:
                tokens += response.tokens.token_ids
        except grpc.aio.AioRpcError as error:
            return _reason(error), tokens
        return ACCEPTED, tokens


def mutated_request(rng: random.Random) -> bytes:
    """A request's bytes after mutations."""
    own: list[Message] = [codec.encode_generate_request(each) for each in REQUESTS]
    message = rng.choice((*own, *own, *stored_messages("generate_request")))
    wire = mutated_message(rng, message, (*own, *parts_of_messages())).SerializeToString()
    if rng.random() < 0.2:
        wire = mutated_bytes(rng, wire, rng.choice(own).SerializeToString())
    return wire


@asynccontextmanager
async def open_stream(service: str, link: FuzzedLink, seed: int) -> AsyncIterator[StreamTarget]:
    """One service's links."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), MODEL, (f"model:{MODEL}",)) as cluster,
    ):
        async with grpc.aio.insecure_channel(cluster.address_of(service)) as channel:
            yield StreamTarget(WatchedServices(cluster), channel, link)


@asynccontextmanager
async def open_generate(seed: int) -> AsyncIterator[CoordinatorTarget]:
    """The coordinator's requests."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), BYTES_MODEL, (f"model:{BYTES_MODEL},noise=0.3",)) as cluster,
    ):
        await until_linked(cluster, to_draft=True)
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            yield CoordinatorTarget(WatchedServices(cluster), channel)
