"""The two kinds of link, and the checks of their handshake.

A link is one bidirectional stream between the coordinator and a service; it carries many sessions in frames. The
coordinator's side is a `PeerLink`, the service's side `serve_link`; both write through a `FrameWriter`. A link has
keepalive and no deadline. When it ends, for whatever reason, both sides are called once (`on_closed` of the service's
handler, `on_down` of the coordinator's link), and all its sessions are over.

A malformed message costs its session a `Failure`. A malformed frame (too large, a second hello, no hello) ends the
link with a typed status. Malformed costs and features are logged, ignored, and change nothing.

Status and costs of a target or draft service, by one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol import codec
from paceline.protocol.codec import draft, target
from paceline.protocol.codec.copying import Copier, Elsewhere, Most, OneOf, bound, check_bounds
from paceline.protocol.draft import DraftCommand, DraftEvent
from paceline.protocol.errors import ProtocolMismatch, VocabularyMismatch
from paceline.protocol.handshake import PROTOCOL_VERSION, Fingerprint, ServiceStatus
from paceline.protocol.target import MAX_AT_WORK, AtWork, TargetCommand, TargetEvent
from paceline.rpc.channel import open_sync_channel
from paceline.rpc.cost_messages import DRAFT_COSTS, TARGET_COSTS
from paceline.rpc.frames import InSession, Message
from paceline.runtime.config import PeerSettings
from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import draft_service_pb2_grpc as draft_grpc
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import target_service_pb2_grpc as target_grpc

HANDSHAKE_TIMEOUT_S = 5.0
Command = TypeVar("Command", bound=InSession)
Event = TypeVar("Event", bound=InSession)


@dataclass(frozen=True)
class LinkKind(Generic[Command, Event]):
    """The messages and costs of one kind of link, and their encoding.

    `ask_status` begins the call for the service's status, on a stub for asyncio or for threads. `signs` returns the
    events that a frame has beside its list of events. `dispensable` names kinds of event that nothing waits for and
    no text depends on.
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


def check_fingerprint(coordinator: Fingerprint, service: Fingerprint) -> None:
    """Compare the coordinator's fingerprint with the service's; a field that is empty on either side fits.

    Raises:
        VocabularyMismatch: tokenizer or vocab_size differ.
        ProtocolMismatch: model or numeric differ, if the coordinator pins them.
    """
    for field in ("tokenizer", "vocab_size", "model", "numeric"):
        limit, value = getattr(coordinator, field), getattr(service, field)
        if limit and value and limit != value:
            kind = VocabularyMismatch if field in ("tokenizer", "vocab_size") else ProtocolMismatch
            raise kind(
                f"fingerprint.{field} = {value!r} (model {service.model!r}): must be {limit!r}, the coordinator's",
                metadata={"field": f"fingerprint.{field}", "value": str(value), "limit": str(limit)},
            )


def check_version(version: int) -> None:
    """Raise `ProtocolMismatch` unless the peer speaks our protocol version."""
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"protocol_version = {version}: must be {PROTOCOL_VERSION}",
            metadata={"field": "protocol_version", "value": str(version), "limit": str(PROTOCOL_VERSION)},
        )


ANSWER_SECONDS = 10.0


def service_status(kind: str, peer: str | PeerSettings, timeout_s: float = ANSWER_SECONDS) -> ServiceStatus:
    """The status of a service, given by host:port or its settings; every kind but `target` counts as a draft service.

    Raises:
        grpc.RpcError: the service can't be reached, or has no such call.
    """
    return codec.decode_service_status(_ask(kind, peer, timeout_s).status)


def service_costs(
    kind: Literal["target", "draft"], peer: str | PeerSettings, timeout_s: float = ANSWER_SECONDS
) -> TargetCosts | DraftCosts:
    """The costs of a service, given by host:port or its settings; lines that it doesn't send are unknown.

    Raises:
        grpc.RpcError: the service can't be reached, or has no such call.
        InvalidInput: its costs are malformed.
    """
    costs: TargetCosts | DraftCosts = _link(kind).costs.decode(_ask(kind, peer, timeout_s).costs)
    return costs


def _ask(kind: str, peer: str | PeerSettings, timeout_s: float) -> Any:
    settings = PeerSettings(address=peer) if isinstance(peer, str) else peer
    with open_sync_channel(settings) as channel:
        return _link(kind).ask_status(_link(kind).stub(channel), timeout_s)


def _link(kind: str) -> LinkKind[Any, Any]:
    return TARGET if kind == "target" else DRAFT
