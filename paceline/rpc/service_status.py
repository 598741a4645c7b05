"""Status and costs of a target or draft service, by one call."""

from __future__ import annotations

from typing import Any, Literal

from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol import codec
from paceline.protocol.handshake import ServiceStatus
from paceline.rpc.channel import open_sync_channel
from paceline.rpc.link_kinds import DRAFT, TARGET, LinkKind
from paceline.runtime.config import PeerSettings

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
