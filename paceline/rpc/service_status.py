"""What a target or a draft service says it is doing, and what its steps take."""

from __future__ import annotations

from typing import Any, Literal

from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol import codec
from paceline.protocol.handshake import ServiceStatus
from paceline.rpc.channel import open_sync_channel
from paceline.rpc.cost_messages import DRAFT_COSTS, TARGET_COSTS
from paceline.runtime.config import PeerSettings
from paceline.v1 import draft_service_pb2, draft_service_pb2_grpc, target_service_pb2, target_service_pb2_grpc

ANSWER_SECONDS = 10.0


def service_status(kind: str, peer: str | PeerSettings, timeout_s: float = ANSWER_SECONDS) -> ServiceStatus:
    """Ask the service at host:port, or as its settings say; every kind but `target` is asked as a draft service.

    Raises:
        grpc.RpcError: it can't be reached, or has no such call.
    """
    return codec.decode_service_status(_ask(kind, peer, timeout_s).status)


def service_costs(
    kind: Literal["target", "draft"], peer: str | PeerSettings, timeout_s: float = ANSWER_SECONDS
) -> TargetCosts | DraftCosts:
    """Ask the service at host:port, or as its settings say, what its steps take; unknown lines where it doesn't say.

    Raises:
        grpc.RpcError: it can't be reached, or has no such call.
        InvalidInput: what it says is no line.
    """
    reply = _ask(kind, peer, timeout_s)
    return TARGET_COSTS.decode(reply.costs) if kind == "target" else DRAFT_COSTS.decode(reply.costs)


def _ask(kind: str, peer: str | PeerSettings, timeout_s: float) -> Any:
    settings = PeerSettings(address=peer) if isinstance(peer, str) else peer
    with open_sync_channel(settings) as channel:
        if kind == "target":
            target = target_service_pb2_grpc.TargetServiceStub(channel)
            return target.GetTargetStatus(target_service_pb2.GetTargetStatusRequest(), timeout=timeout_s)
        draft = draft_service_pb2_grpc.DraftServiceStub(channel)
        return draft.GetDraftStatus(draft_service_pb2.GetDraftStatusRequest(), timeout=timeout_s)
