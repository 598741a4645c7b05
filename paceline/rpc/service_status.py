"""What a target or a draft service says it is doing."""

from __future__ import annotations

from typing import Literal

from paceline.protocol import codec
from paceline.protocol.handshake import ServiceStatus
from paceline.rpc.channel import open_sync_channel
from paceline.runtime.config import PeerSettings
from paceline.v1 import draft_service_pb2, draft_service_pb2_grpc, target_service_pb2, target_service_pb2_grpc

ANSWER_SECONDS = 10.0


def service_status(kind: Literal["target", "draft", "coordinator"], address: str) -> ServiceStatus:
    """Ask the service at host:port; every kind but `target` is asked as a draft service.

    Raises:
        grpc.RpcError: it can't be reached, or has no such call.
    """
    with open_sync_channel(PeerSettings(address=address)) as channel:
        if kind == "target":
            target = target_service_pb2_grpc.TargetServiceStub(channel)
            reply = target.GetTargetStatus(target_service_pb2.GetTargetStatusRequest(), timeout=ANSWER_SECONDS)
        else:
            draft = draft_service_pb2_grpc.DraftServiceStub(channel)
            reply = draft.GetDraftStatus(draft_service_pb2.GetDraftStatusRequest(), timeout=ANSWER_SECONDS)
    return codec.decode_service_status(reply.status)
