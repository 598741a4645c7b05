"""The two kinds of link, and what both ends of one check of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.protocol import codec
from paceline.protocol.draft import DraftCommand, DraftEvent
from paceline.protocol.errors import InvalidInput, ProtocolMismatch, VocabularyMismatch
from paceline.protocol.handshake import MAX_FRAME_BYTES, PROTOCOL_VERSION, Fingerprint
from paceline.protocol.target import TargetCommand, TargetEvent
from paceline.rpc.frames import InSession, Message
from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import draft_service_pb2_grpc as draft_grpc
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import target_service_pb2_grpc as target_grpc

HANDSHAKE_TIMEOUT_S = 5.0
Command = TypeVar("Command", bound=InSession)
Event = TypeVar("Event", bound=InSession)


@dataclass(frozen=True)
class LinkKind(Generic[Command, Event]):
    """What distinguishes the two kinds of link: their messages and how they are encoded."""

    method: str
    stub: Callable[[Any], Any]
    request: Callable[..., Message]
    response: Callable[..., Message]
    encode_command: Callable[[Command], Message]
    decode_command: Callable[[Message], Command]
    encode_event: Callable[[Any], Message]
    decode_event: Callable[[Message], Event]


TARGET: LinkKind[TargetCommand, TargetEvent] = LinkKind(
    method="Verify",
    stub=target_grpc.TargetServiceStub,
    request=target_pb.VerifyRequest,
    response=target_pb.VerifyResponse,
    encode_command=codec.encode_target_command,
    decode_command=codec.decode_target_command,
    encode_event=codec.encode_target_event,
    decode_event=codec.decode_target_event,
)
DRAFT: LinkKind[DraftCommand, DraftEvent] = LinkKind(
    method="Draft",
    stub=draft_grpc.DraftServiceStub,
    request=draft_pb.DraftRequest,
    response=draft_pb.DraftResponse,
    encode_command=codec.encode_draft_command,
    decode_command=codec.decode_draft_command,
    encode_event=codec.encode_draft_event,
    decode_event=codec.decode_draft_event,
)


def check_fingerprint(expected: Fingerprint, found: Fingerprint) -> None:
    """Compare what a coordinator expects with what a service runs; fields empty on either side fit.

    Raises:
        VocabularyMismatch: tokenizer or vocab_size differ.
        ProtocolMismatch: model or numeric differ, when the coordinator pins them.
    """
    for field in ("tokenizer", "vocab_size", "model", "numeric"):
        wanted, value = getattr(expected, field), getattr(found, field)
        if wanted and value and wanted != value:
            kind = VocabularyMismatch if field in ("tokenizer", "vocab_size") else ProtocolMismatch
            raise kind(
                f"fingerprint.{field} = {value!r} (model {found.model!r}): must be {wanted!r}, the coordinator's",
                metadata={"field": f"fingerprint.{field}", "value": str(value), "limit": str(wanted)},
            )


def check_version(version: int) -> None:
    """Raise `ProtocolMismatch` unless the peer speaks our protocol version."""
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"protocol_version = {version}: must be {PROTOCOL_VERSION}",
            metadata={"field": "protocol_version", "value": str(version), "limit": str(PROTOCOL_VERSION)},
        )


def check_frame(frame: Message) -> None:
    """Raise `InvalidInput` for a frame beyond the size that both ends allow."""
    size = frame.ByteSize()
    if size > MAX_FRAME_BYTES:
        raise InvalidInput.of("frame bytes", size, f"at most {MAX_FRAME_BYTES}")


async def first_to_end(*bodies: Any, at_end: Callable[[], None]) -> None:
    """Run bodies side by side until one ends; the others are cancelled, its exception is raised.

    If several end at once the first one's exception counts: a reader knows why
    a stream ended, a writer only that it did. `at_end` is called exactly once,
    before anything else is waited for.
    """
    tasks = [asyncio.ensure_future(body) for body in bodies]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        try:
            at_end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
