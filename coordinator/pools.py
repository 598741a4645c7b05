"""The coordinator's pools of targets and draft services, made from its configuration."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coordinator.sessions.draft_pool import DraftPeer, DraftPool
from coordinator.sessions.membership import Membership
from coordinator.sessions.pool import AnyPeer, Pool
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.handshake import Fingerprint, Hello
from paceline.rpc.endpoints import Endpoint, EndpointSource
from paceline.rpc.peer_link import DraftLink, TargetLink
from paceline.runtime.config import CoordinatorConfig, PoolSettings
from paceline.runtime.roles import PeerRole


@dataclass(frozen=True)
class Pools:
    """Targets and, if there are any, draft services, with what keeps them in step with their endpoints."""

    target: TargetPool
    draft: DraftPool | None
    memberships: tuple[Membership[Any], ...]

    @classmethod
    def of(cls, config: CoordinatorConfig, tokenizer: Tokenizer) -> Pools:
        """Pools without peers yet.

        Raises:
            InvalidInput: an address is none of the forms of `EndpointSource`.
        """
        fingerprint = Fingerprint(tokenizer=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size)
        hello = Hello(incarnation=secrets.token_hex(8), fingerprint=fingerprint)
        backoff: dict[str, Any] = {
            "reconnect_min_ms": config.reconnect_min_ms,
            "reconnect_max_ms": config.reconnect_max_ms,
        }

        def target_at(endpoint: Endpoint) -> TargetPeer:
            peer = config.reach(config.target, PeerRole.TARGET, endpoint.address, endpoint.server_name)
            return TargetPeer(TargetLink(peer, hello, **backoff))

        target = TargetPool(
            round_timeout_s=config.round_timeout_ms / 1e3,
            wait_s=config.target_wait_ms / 1e3,
            vocab_size=tokenizer.vocab_size,
        )
        targets = _membership(target, config.target, target_at)
        if config.draft is None:
            return cls(target, None, (targets,))
        settings = config.draft

        def draft_at(endpoint: Endpoint) -> DraftPeer:
            peer = config.reach(settings, PeerRole.DRAFT, endpoint.address, endpoint.server_name)
            return DraftPeer(DraftLink(peer, hello, **backoff))

        draft = DraftPool(timeout_s=config.draft_timeout_ms / 1e3, vocab_size=tokenizer.vocab_size)
        return cls(target, draft, (targets, _membership(draft, settings, draft_at)))

    def start(self) -> None:
        """Look for endpoints, and link to them."""
        for membership in self.memberships:
            membership.start()

    async def close(self) -> None:
        """End every link."""
        await asyncio.gather(*(membership.close() for membership in self.memberships))


def _membership(
    pool: Pool[AnyPeer], settings: PoolSettings, make: Callable[[Endpoint], AnyPeer]
) -> Membership[AnyPeer]:
    sources = [EndpointSource.parse(f"{pool.role}.address", text) for text in settings.address]
    return Membership(pool, sources, make)
