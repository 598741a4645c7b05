"""The codec: every message that crosses a wire, decoded from mutated bytes, and encoded again if it is accepted."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.message import DecodeError, Message

from paceline.protocol.draft import DraftedProposal
from paceline.protocol.errors import PacelineError
from tests.fuzz.cases import ACCEPTED, SLOW_S, FuzzCase, typed, within
from tests.fuzz.message_mutations import mutated_message, parts_of_messages, stored_messages
from tests.fuzz.odd_values import mutated_bytes
from tests.protocol.test_codec import PAIRS

UNREADABLE = "no protobuf"
"""The protobuf library refuses it: gRPC ends the call before the codec sees it."""
NAMES = tuple(PAIRS)


def mutated_wire(rng: random.Random, name: str) -> bytes:
    """Bytes of a stored message after mutations of its fields, its bytes, or both."""
    message = rng.choice(stored_messages(name))
    if rng.random() < 0.7:
        message = mutated_message(rng, message, parts_of_messages())
    wire = message.SerializeToString()
    if rng.random() < 0.35:
        other = rng.choice(stored_messages(rng.choice(NAMES))).SerializeToString()
        wire = mutated_bytes(rng, wire, other)
    return wire


def decoded(name: str, wire: bytes) -> str:
    encode, decode, _ = PAIRS[name]
    kind: type[Message] = type(stored_messages(name)[0])
    try:
        message = kind.FromString(wire)
    except DecodeError:
        return UNREADABLE
    try:
        value = decode(message)
        if isinstance(value, DraftedProposal):
            _ = value.proposal, value.timings  # decoded when they are read
    except PacelineError as error:
        return typed(error)
    again = kind.FromString(encode(value).SerializeToString())
    decode(again)
    return ACCEPTED


class CodecTarget:
    def __init__(self) -> None:
        self._wires = [(name, each.SerializeToString()) for name in NAMES for each in stored_messages(name)]

    async def run(self, case: FuzzCase) -> str:
        rng = case.rng
        name = rng.choice(NAMES)
        wire = mutated_wire(rng, name)
        began = time.thread_time()
        kind = decoded(name, wire)
        within(SLOW_S, began)
        return kind

    async def probe(self) -> None:
        for name, wire in self._wires:
            assert decoded(name, wire) == ACCEPTED, name

    def facts(self) -> dict[str, str]:
        return {}


@asynccontextmanager
async def open_codec(seed: int) -> AsyncIterator[CodecTarget]:
    """Mutations without looking at what they reach."""
    yield CodecTarget()
