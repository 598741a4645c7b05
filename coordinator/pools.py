"""The coordinator's pools of targets and draft services, made from its configuration.

A pool's peers are kept in step with its endpoints: new ones get links, vanished ones drain. Peers are asked for load.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from coordinator.sessions.target_pool import TargetPeer, TargetPool
from paceline.drafting.draft_pool import DraftPeer, DraftPool
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import PacelineError
from paceline.protocol.handshake import Fingerprint, Hello
from paceline.rpc.endpoints import Endpoint, EndpointSource, EndpointWatch
from paceline.rpc.peer_link import DraftLink, TargetLink
from paceline.rpc.peer_pool import AnyPeer, Pool
from paceline.runtime.background import BackgroundTasks
from paceline.runtime.config import CoordinatorConfig, PoolSettings
from paceline.runtime.roles import PeerRole

logger = logging.getLogger(__name__)

LOAD_PERIOD_S = 1.0
"""Seconds between two questions to a peer for its load. A generation takes seconds, an answer a millisecond."""


class Membership(Generic[AnyPeer]):
    """Makes, drains and drops the peers of a pool.

    Args:
        pool: the pool of the peers.
        sources: of the pool's endpoints.
        make: makes a peer for an endpoint, with a link that is not started.
    """

    def __init__(
        self, pool: Pool[AnyPeer], sources: Sequence[EndpointSource], make: Callable[[Endpoint], AnyPeer]
    ) -> None:
        self._pool = pool
        pool.sources = ", ".join(source.text for source in sources)
        self._make = make
        self._watch = EndpointWatch(sources, self._update)
        self._draining: dict[str, AnyPeer] = {}
        self._tasks = BackgroundTasks(self._on_failure)

    def start(self) -> None:
        """Begin to look for endpoints and to link to them."""
        self._tasks.spawn(self._watch.run())
        self._tasks.spawn(self._ask_loads())

    async def close(self) -> None:
        """End every link."""
        await self._tasks.close()
        peers = (*self._pool.peers, *self._draining.values())
        await asyncio.gather(*(peer.link.close() for peer in peers))

    def _update(self, endpoints: Sequence[Endpoint]) -> None:
        by_address = {endpoint.address: endpoint for endpoint in endpoints}
        for peer in self._pool.peers:
            if peer.link.address not in by_address:
                self._drain(peer)
        addresses = {peer.link.address for peer in self._pool.peers}
        for address, endpoint in by_address.items():
            if address in self._draining:
                self._pool.add(self._draining.pop(address))
            elif address not in addresses:
                peer = self._make(endpoint)
                self._pool.add(peer)
                self._tasks.spawn(peer.link.start())

    def _drain(self, peer: AnyPeer) -> None:
        """Give a peer no new sessions. Its link ends with the last session, or when it breaks."""
        self._pool.remove(peer)
        logger.info(
            "endpoint vanished, draining: peer=%s address=%s sessions=%d",
            self._pool.role, peer.link.address, peer.sessions,
        )  # fmt: skip
        self._draining[peer.link.address] = peer
        peer.on_idle = lambda: self._drop_if_drained(peer)
        self._drop_if_drained(peer)

    def _drop_if_drained(self, peer: AnyPeer) -> None:
        if not peer.sessions and self._draining.get(peer.link.address) is peer:
            del self._draining[peer.link.address]
            logger.info("drained: peer=%s address=%s", self._pool.role, peer.link.address)
            self._tasks.spawn(peer.link.close())

    async def _ask_loads(self) -> None:
        """Ask each peer for its load every `LOAD_PERIOD_S`, where there are several."""
        while True:
            peers = [peer for peer in self._pool.peers if peer.link.is_up]
            if len(self._pool.peers) > 1:
                await asyncio.gather(*(self._ask_load(peer) for peer in peers))
            await asyncio.sleep(LOAD_PERIOD_S)

    async def _ask_load(self, peer: AnyPeer) -> None:
        try:
            status = await peer.link.status(LOAD_PERIOD_S)
        except PacelineError as error:
            logger.debug("no status: peer=%s address=%s error=%s", self._pool.role, peer.link.address, error)
        else:
            peer.foreign_sessions = max(0, status.sessions - peer.sessions)

    def _on_failure(self, error: BaseException) -> None:
        logger.error("keeping the pool failed: peer=%s", self._pool.role, exc_info=error)


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
