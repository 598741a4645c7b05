"""Links, their two kinds, and what their ends check of each other in the handshake.

A link is one bidirectional stream between the coordinator and a service; it carries many sessions in frames. The
coordinator's side is a `PeerLink`, the service's side `serve_link`; both write through a `FrameWriter`. A link has
keepalive and no deadline. When it breaks, in whatever way, the service's handler is told once (`closed`) and so is
the coordinator (`on_down`): all its sessions are over.

A malformed message costs its session a `Failure`; a malformed frame (too large, a second hello, none at all) ends
the link with a typed status; malformed costs and features are named in the log, left out, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.protocol.codec import draft, target
from paceline.protocol.codec.bounds import Elsewhere, Most, bound, check_bounds
from paceline.protocol.codec.copying import Copier, OneOf
from paceline.protocol.draft import DraftCommand, DraftEvent
from paceline.protocol.errors import ProtocolMismatch, VocabularyMismatch
from paceline.protocol.handshake import PROTOCOL_VERSION, Fingerprint
from paceline.protocol.target import MAX_AT_WORK, AtWork, TargetCommand, TargetEvent
from paceline.rpc.cost_messages import DRAFT_COSTS, TARGET_COSTS
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
    """What distinguishes the two kinds of link: their messages, the service's costs, and how they are encoded.

    `ask_status`: begins the call for the service's status, on a stub for asyncio or for threads. `signs`: events that
    a frame has beside those that are written as such. `dispensable`: kinds of event that nothing waits for and no
    text depends on.
    """

    method: str
    stub: Callable[[Any], Any]
    request: Callable[..., Message]
    response: Callable[..., Message]
    commands: OneOf[Command, Any]
    events: OneOf[Event, Any]
    ask_status: Callable[[Any, float], Any]
    costs: Copier[Any, Any]
    signs: Callable[[Message], Iterable[Event]] = lambda frame: ()
    dispensable: frozenset[str] = frozenset()


_BY_THE_FRAME = Elsewhere("check_frame: at most MAX_FRAME_MESSAGES")
bound(target_pb.VerifyRequest, "", commands=_BY_THE_FRAME)
bound(target_pb.VerifyResponse, "", events=_BY_THE_FRAME, at_work=Most(MAX_AT_WORK, "at_work sessions"))
bound(draft_pb.DraftRequest, "", commands=_BY_THE_FRAME)
bound(draft_pb.DraftResponse, "", events=_BY_THE_FRAME)


def _signs_of_target(frame: Message) -> Iterable[AtWork]:
    check_bounds(frame)
    return map(AtWork, frame.at_work)


TARGET: LinkKind[TargetCommand, TargetEvent] = LinkKind(
    method="Verify",
    stub=target_grpc.TargetServiceStub,
    request=target_pb.VerifyRequest,
    response=target_pb.VerifyResponse,
    commands=target.COMMAND,
    events=target.EVENT,
    ask_status=lambda stub, timeout_s: stub.GetTargetStatus(target_pb.GetTargetStatusRequest(), timeout=timeout_s),
    costs=TARGET_COSTS,
    signs=_signs_of_target,
    dispensable=frozenset({"features"}),
)
DRAFT: LinkKind[DraftCommand, DraftEvent] = LinkKind(
    method="Draft",
    stub=draft_grpc.DraftServiceStub,
    request=draft_pb.DraftRequest,
    response=draft_pb.DraftResponse,
    commands=draft.COMMAND,
    events=draft.EVENT,
    ask_status=lambda stub, timeout_s: stub.GetDraftStatus(draft_pb.GetDraftStatusRequest(), timeout=timeout_s),
    costs=DRAFT_COSTS,
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
