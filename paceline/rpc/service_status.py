"""What a target or a draft service says it is doing."""

from __future__ import annotations

from typing import Literal

from paceline.protocol import codec
from paceline.protocol.handshake import ServiceStatus
from paceline.rpc.channel import open_sync_channel
from paceline.runtime.config import PeerSettings
from paceline.v1 import draft_service_pb2, draft_service_pb2_grpc, target_service_pb2, target_service_pb2_grpc

ANSWER_SECONDS = 10.0


def service_status(
    kind: Literal["target", "draft", "coordinator"], peer: str | PeerSettings, timeout_s: float = ANSWER_SECONDS
) -> ServiceStatus:
    """Ask the service at host:port, or as its settings say; every kind but `target` is asked as a draft service.

    Raises:
        grpc.RpcError: it can't be reached, or has no such call.
    """
    settings = PeerSettings(address=peer) if isinstance(peer, str) else peer
    with open_sync_channel(settings) as channel:
        if kind == "target":
            target = target_service_pb2_grpc.TargetServiceStub(channel)
            reply = target.GetTargetStatus(target_service_pb2.GetTargetStatusRequest(), timeout=timeout_s)
        else:
            draft = draft_service_pb2_grpc.DraftServiceStub(channel)
            reply = draft.GetDraftStatus(draft_service_pb2.GetDraftStatusRequest(), timeout=timeout_s)
    return codec.decode_service_status(reply.status)
