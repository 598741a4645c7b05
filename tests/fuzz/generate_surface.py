"""A running coordinator over gRPC, given mutated requests."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Sequence
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
from tests.fuzz.cases import ACCEPTED, FuzzCase, Untyped, typed
from tests.fuzz.message_mutations import mutated_message, parts_of_messages, stored_messages
from tests.fuzz.odd_values import mutated_bytes
from tests.fuzz.running_services import WatchedServices, until_linked

BYTES_MODEL = "table:vocab=300,seed=1,max_length=96"
"""It has an end token, so that grammars are followed, and short texts, so that no request is long."""
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


def _reason(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise Untyped(f"no end within {STREAM_S:g} s")
    return typed(from_rpc_error(error))


@dataclass
class CoordinatorTarget:
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
    own: list[Message] = [codec.encode_generate_request(each) for each in REQUESTS]
    message = rng.choice((*own, *own, *stored_messages("generate_request")))
    wire = mutated_message(rng, message, (*own, *parts_of_messages())).SerializeToString()
    if rng.random() < 0.2:
        wire = mutated_bytes(rng, wire, rng.choice(own).SerializeToString())
    return wire


@asynccontextmanager
async def open_generate(seed: int) -> AsyncIterator[CoordinatorTarget]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), BYTES_MODEL, (f"model:{BYTES_MODEL},noise=0.3",)) as cluster,
    ):
        await until_linked(cluster, to_draft=True)
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            yield CoordinatorTarget(WatchedServices(cluster), channel)
