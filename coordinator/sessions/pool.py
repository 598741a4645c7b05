"""The peers of one kind that sessions can be placed on, and those that drain."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from coordinator.sessions.peer import Peer
from coordinator.sessions.placement import PrefixMemory, choose
from paceline.protocol.errors import Overloaded, PacelineError, PeerUnavailable, fresh
from paceline.protocol.handshake import Welcome
from paceline.rpc.retries import Retries, RetryBudget

AnyPeer = TypeVar("AnyPeer", bound=Peer[Any, Any])
Fits = Callable[[AnyPeer], bool]
"""Whether a session may go to a peer that is up."""

MOST_NAMED = 8
"""Peers that an error names."""
REFUSED_S = 0.2
"""How long a peer that refused a session without a hint gets no other one."""


def anywhere(_: Peer[Any, Any]) -> bool:
    """For sessions that fit every peer."""
    return True


class Pool(Generic[AnyPeer]):
    """Places sessions on peers. A session stays where it is; a removed peer keeps its sessions and gets no new ones.

    Args:
        role: what the peers are, for messages.
        peers: the first ones.
    """

    def __init__(self, role: str, peers: Iterable[AnyPeer] = ()) -> None:
        self.role = role
        self._peers: list[AnyPeer] = []
        self._prefixes = PrefixMemory()
        self._changed = asyncio.Event()
        self.budget = RetryBudget()
        """Of sessions that go on and were refused for want of room."""
        self.sources = ""
        """Where endpoints are looked for, for messages."""
        for peer in peers:
            self.add(peer)

    @property
    def peers(self) -> Sequence[AnyPeer]:
        """Those that take new sessions when they are up."""
        return tuple(self._peers)

    @property
    def is_up(self) -> bool:
        """Whether a link stands to any of them."""
        return any(peer.link.is_up for peer in self._peers)

    @property
    def welcomes(self) -> tuple[Welcome, ...]:
        """Of the peers that are up; if none is, the last ones of those that were."""
        known = [(peer.link.is_up, peer.link.welcome) for peer in self._peers if peer.link.welcome is not None]
        return tuple(welcome for up, welcome in known if welcome and (up or not self.is_up))

    def add(self, peer: AnyPeer) -> None:
        """Take a peer in; it gets sessions once its link is up."""
        peer.link.on_change = self._changed.set
        self._peers.append(peer)
        self._changed.set()

    def remove(self, peer: AnyPeer) -> None:
        """Give a peer no more sessions."""
        self._peers.remove(peer)
        self._changed.set()

    def place(self, token_ids: Sequence[int], fits: Fits[AnyPeer] = anywhere, tenant: str = "") -> AnyPeer | None:
        """The peer for a session with this prefix; None: no peer is up that it fits.

        Peers that refused a session lately are asked only where there is no other.
        """
        takers = self._willing(fits) or self._standing(fits)
        if not takers:
            return None
        if len(self._peers) == 1:
            return takers[0]
        chosen = choose({peer: peer.load for peer in takers}, self._prefixes.longest(takers, token_ids, tenant))
        self.remember(chosen, token_ids, tenant)
        return chosen

    def first(self, fits: Fits[AnyPeer] = anywhere) -> AnyPeer | None:
        """One that a session might be placed on, for what is to be known before it is; None: no peer is up."""
        return next(iter(self._standing(fits)), None)

    def remember(self, peer: AnyPeer, token_ids: Sequence[int], tenant: str = "") -> None:
        """A peer has the rows of these tokens: what the tenant sends behind them is best placed there."""
        if len(self._peers) > 1:
            self._prefixes.remember(peer, token_ids, tenant)

    def is_willing(self, fits: Fits[AnyPeer] = anywhere) -> bool:
        """Whether there is a peer for a session that has not refused one lately."""
        return bool(self._willing(fits))

    def refused(self, peer: AnyPeer, error: PacelineError) -> None:
        """A peer with a standing link did not take a session: others are asked for a while."""
        pause_s = REFUSED_S if error.retry_after_ms is None else error.retry_after_ms / 1e3
        peer.refusal, peer.refuses_until = error, time.monotonic() + pause_s

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until a link stands.

        Raises:
            VocabularyMismatch, ProtocolMismatch: the only peer is there and doesn't fit; raised at once.
            PeerUnavailable: none came up in time; names them and why.
        """
        await self._wait(lambda: bool(self._standing(anywhere)), timeout_s, anywhere)

    async def wait_willing(self, timeout_s: float, fits: Fits[AnyPeer]) -> None:
        """Wait until there is a peer for a session that has not refused one lately. Raises as `wait_up`."""
        await self._wait(lambda: self.is_willing(fits), timeout_s, fits)

    async def wait_to_retry(self, error: PacelineError, retries: Retries, left_s: float, fits: Fits[AnyPeer]) -> None:
        """Wait until a session may be opened again: where all peers have refused it for want of room, on the budget.

        A link that is up again is waited for by all its sessions, and comes once: that needs no budget.

        Raises:
            PacelineError: no peer takes it in time.
        """
        deadline = time.monotonic() + max(0.0, left_s)
        if isinstance(error, Overloaded) and not self.is_willing(fits):
            for pause_s in retries.pauses(error, max(0.0, left_s)):
                await asyncio.sleep(pause_s)
        await self.wait_willing(max(0.0, deadline - time.monotonic()), fits)

    def why_none(self, fits: Fits[AnyPeer] = anywhere) -> PacelineError:
        """An error to raise where no peer takes a session."""
        if not self._peers:
            return PeerUnavailable(f"no {self.role} is known ({self.sources})", metadata={"peer": self.role})
        reasons = [self._why_not(peer, fits) for peer in self._peers]
        if len(reasons) == 1:
            return reasons[0]
        named = "; ".join(reason.message for reason in reasons[:MOST_NAMED])
        return PeerUnavailable(
            f"none of {len(reasons)} {self.role}s takes the session: {named}", metadata={"peer": self.role}
        )

    async def _wait(self, is_ready: Callable[[], bool], timeout_s: float, fits: Fits[AnyPeer]) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            next_try_s = self._next_try_s()  # first: a pause that ends meanwhile is seen by what follows
            if is_ready():
                return
            left = deadline - time.monotonic()
            misfits = [peer.link.is_refused for peer in self._peers]
            if left <= 0 or (misfits and all(misfits)):
                raise self.why_none(fits)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, next_try_s)):
                    await self._changed.wait()

    def _standing(self, fits: Fits[AnyPeer]) -> list[AnyPeer]:
        return [peer for peer in self._peers if peer.link.is_up and self._admits(peer) and fits(peer)]

    def _willing(self, fits: Fits[AnyPeer]) -> list[AnyPeer]:
        now = time.monotonic()
        return [peer for peer in self._standing(fits) if now >= peer.refuses_until]

    def _admits(self, peer: AnyPeer) -> bool:
        """Whether a peer that is up belongs to the pool, whatever the session."""
        return True

    def _next_try_s(self) -> float:
        """Until a peer that refused may be asked again."""
        now = time.monotonic()
        pauses = [peer.refuses_until - now for peer in self._peers if peer.link.is_up and peer.refuses_until > now]
        return min(pauses, default=float("inf"))

    def _why_not(self, peer: AnyPeer, fits: Fits[AnyPeer]) -> PacelineError:
        if not peer.link.is_up:
            return peer.link.why_down()
        if peer.refusal is not None and self._admits(peer) and fits(peer):
            return fresh(peer.refusal)
        return PeerUnavailable(
            f"{self.role} at {peer.link.address} is of another model or version, or computes in another way"
        )
