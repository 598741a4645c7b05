"""The description of the served model and of the coordinator's peers."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.prepare import ServedModel
from coordinator.sessions.draft_pool import DraftPeer, DraftPool
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from paceline.costs.cost_line import CostLine
from paceline.protocol.generation import MAX_PEERS, ModelDescription, PeerDescription, PeerKind
from paceline.protocol.handshake import Fingerprint, Welcome


def describe(model: ServedModel, targets: TargetPool, drafts: DraftPool | None, tenant: str = "") -> ModelDescription:
    """Describe the served model and the peers that take new sessions, for a caller of this tenant."""
    return ModelDescription(
        name=model.name,
        target=_fingerprint(targets.welcomes),
        draft=_fingerprint(drafts.welcomes if drafts else ()),
        max_length=model.max_length,
        drafters=model.drafters,
        target_ready=targets.is_up,
        draft_ready=drafts is not None and drafts.is_up,
        peers=tuple(_peers(targets, drafts))[:MAX_PEERS],
        sampling=model.defaults.sampling,
        max_new_tokens=model.defaults.max_new_tokens,
        tenant=tenant,
    )


def _fingerprint(welcomes: tuple[Welcome, ...]) -> Fingerprint:
    return welcomes[0].fingerprint if welcomes else Fingerprint()


def _peers(targets: TargetPool, drafts: DraftPool | None) -> Iterator[PeerDescription]:
    yield from (_peer(PeerKind.TARGET, peer, peer.costs.alone) for peer in targets.peers)
    if drafts is not None:
        yield from (_peer(PeerKind.DRAFT, peer, peer.costs.line) for peer in drafts.peers)


def _peer(kind: PeerKind, peer: TargetPeer | DraftPeer, line: CostLine) -> PeerDescription:
    link, costs = peer.link, peer.costs
    return PeerDescription(
        kind=kind,
        address=link.address,
        up=link.is_up,
        problem="" if link.is_up else link.why_down().message,
        fingerprint=link.welcome.fingerprint if link.welcome else Fingerprint(),
        sessions=peer.sessions,
        step_sessions=costs.sessions,
        step_rows=costs.rows,
        queue=costs.queue,
        step_ms=line.ms(1) if line.is_known else 0.0,
    )
