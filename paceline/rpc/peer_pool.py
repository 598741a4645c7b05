"""A pool of peers of one kind, on which sessions are placed.

A session goes to the peer that has its prefix cached, unless that one is overloaded; else to the least loaded. The
coordinator does not ask what a service has cached. It remembers which tokens it sent to which peer, in a bounded
memory of blocks. A service may have dropped some since: a wrong guess costs a prefill, never a token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from paceline.protocol.errors import Overloaded, PacelineError, PeerUnavailable, fresh
from paceline.protocol.handshake import Welcome
from paceline.protocol.session import Close
from paceline.rpc.frames import InSession
from paceline.rpc.peer_link import PeerLink
from paceline.rpc.retries import Retries, RetryBudget
from paceline.runtime import clock

Command = TypeVar("Command", bound=InSession)
Event = TypeVar("Event", bound=InSession)
ReceivedEvent = TypeVar("ReceivedEvent", bound=InSession, contravariant=True)


class PeerSession(Protocol[ReceivedEvent]):
    """One request's end of a session. Both methods run on the event loop and must not block."""

    def on_event(self, event: ReceivedEvent) -> None:
        """Handle what the peer sent for this session."""

    def on_lost(self, error: PacelineError) -> None:
        """The link broke, and this session with it."""


class Peer(Generic[Command, Event]):
    """Gives sessions their ids and hands them their events.

    `refuses_until`: until then, on the monotonic clock, the peer gets no new session; `refusal` is the reason.
    `foreign_sessions`: the number of sessions of other coordinators, as the service stated last.
    """

    def __init__(self, link: PeerLink[Command, Event]) -> None:
        self.link = link
        self.refuses_until = 0.0
        self.refusal: PacelineError | None = None
        self.foreign_sessions = 0
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last session has gone."""
        self._sessions: dict[int, PeerSession[Event]] = {}
        link.on_event = self._on_event
        link.on_down = self._on_down

    @property
    def sessions(self) -> int:
        """The number of this coordinator's sessions."""
        return len(self._sessions)

    @property
    def load(self) -> int:
        """The number of all coordinators' sessions as far as it is known, including those that wait."""
        return self.sessions + self.foreign_sessions

    def attach(self, session: PeerSession[Event]) -> int:
        """Give a session its id on the standing link."""
        session_id = self.link.next_session_id()
        self._sessions[session_id] = session
        return session_id

    def detach(self, session_id: int) -> None:
        """Forget a session, and close it on the peer if the link is up."""
        self._sessions.pop(session_id, None)
        if self.link.is_up:
            self.link.send(Close(session_id))  # type: ignore[arg-type]  # every kind of link has Close
        if not self._sessions:
            self.on_idle()

    def _on_event(self, event: Event) -> None:
        session = self._sessions.get(event.session_id)
        if session is not None:
            session.on_event(event)

    def _on_down(self, error: PacelineError) -> None:
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.on_lost(error)
        self.on_idle()


Place = TypeVar("Place", bound=Hashable)

BLOCK_TOKENS = 64
"""Tokens that are remembered together; a shorter common prefix is not worth a busier peer."""
MAX_BLOCKS = 1 << 16
"""About four million tokens; a block takes some 200 bytes."""
MOST_UNEVEN = 2.0
"""A peer with up to this many times the least load may be preferred for its cache. A step's time grows at most in
proportion to its sessions, so a session there is at worst half as fast."""
ALWAYS_EVEN = 4
"""Loads that differ by up to this many sessions count as even: small batches cost little more than one session."""


class PrefixMemory:
    """Remembers which tokens were sent to which place: the latest `max_blocks` blocks of all places together."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._blocks: OrderedDict[tuple[Hashable, int], None] = OrderedDict()
        self._max_blocks = max_blocks

    def remember(self, place: Hashable, token_ids: Sequence[int], tenant: str = "") -> None:
        """Note that a place has these tokens of this tenant now."""
        for key in _keys(tenant, token_ids):
            self._blocks[place, key] = None
            self._blocks.move_to_end((place, key))
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def longest(self, places: Sequence[Place], token_ids: Sequence[int], tenant: str = "") -> dict[Place, int]:
        """The number of leading tokens that each place has of a prefix, in whole blocks.

        Tenants are separate, as in the targets' caches. So a session's place tells nobody what other tenants sent.
        """
        blocks = dict.fromkeys(places, 0)
        holding = list(places)
        for key in _keys(tenant, token_ids):
            holding = [place for place in holding if (place, key) in self._blocks]
            if not holding:
                break
            for place in holding:
                blocks[place] += 1
        return {place: count * BLOCK_TOKENS for place, count in blocks.items()}


def choose(loads: Mapping[Place, float], cached_tokens: Mapping[Place, int]) -> Place:
    """Choose a session's place: of those not overloaded the one with most of its prefix, then the least loaded.

    Args:
        loads: the number of sessions of each place; at least one place.
        cached_tokens: the number of the prefix's tokens that each place has.
    """
    most = max(MOST_UNEVEN * min(loads.values()), min(loads.values()) + ALWAYS_EVEN)
    return max(loads, key=lambda place: (loads[place] <= most, cached_tokens[place], -loads[place]))


def _keys(tenant: str, token_ids: Sequence[int]) -> Iterator[int]:
    """A key for each whole block: a hash of the tenant and of all tokens up to the block's end."""
    key = hash(tenant)
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        key = hash((key, *token_ids[end - BLOCK_TOKENS : end]))
        yield key


AnyPeer = TypeVar("AnyPeer", bound=Peer[Any, Any])
Fits = Callable[[AnyPeer], bool]
"""Says whether a session may go to a peer that is up."""

MOST_NAMED = 8
"""Most peers that an error names."""
REFUSED_S = 0.2
"""Pause of a peer that refused a session and did not say how long to wait."""


def fits_any(_: Peer[Any, Any]) -> bool:
    """Every peer fits."""
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
        self._change = asyncio.Event()
        self.budget = RetryBudget()
        """The retry budget of sessions that were lost and then refused for want of room."""
        self.sources = ""
        """The sources of the endpoints, for messages."""
        for peer in peers:
            self.add(peer)

    @property
    def peers(self) -> Sequence[AnyPeer]:
        """The peers that take new sessions when they are up."""
        return tuple(self._peers)

    @property
    def is_up(self) -> bool:
        """Whether a link to any peer is up."""
        return any(peer.link.is_up for peer in self._peers)

    @property
    def welcomes(self) -> tuple[Welcome, ...]:
        """The welcomes of the peers that are up; if none is, the latest ones of those that were."""
        links = [(peer.link.is_up, peer.link.welcome) for peer in self._peers if peer.link.welcome is not None]
        return tuple(welcome for is_up, welcome in links if welcome and (is_up or not self.is_up))

    def add(self, peer: AnyPeer) -> None:
        """Add a peer; it gets sessions once its link is up."""
        peer.link.on_change = self._change.set
        self._peers.append(peer)
        self._change.set()

    def remove(self, peer: AnyPeer) -> None:
        """Give a peer no more sessions."""
        self._peers.remove(peer)
        self._change.set()

    def place(self, token_ids: Sequence[int], fits: Fits[AnyPeer] = fits_any, tenant: str = "") -> AnyPeer | None:
        """Choose the peer for a session with this prefix; None: no peer is up that it fits.

        A peer that refused a session lately is chosen only where there is no other.
        """
        takers = self._willing(fits) or self._standing(fits)
        if not takers:
            return None
        if len(self._peers) == 1:
            return takers[0]
        peer = choose({peer: peer.load for peer in takers}, self._prefixes.longest(takers, token_ids, tenant))
        self.remember(peer, token_ids, tenant)
        return peer

    def first(self, fits: Fits[AnyPeer] = fits_any) -> AnyPeer | None:
        """A peer that a session might be placed on, to learn about it in advance; None: no peer is up."""
        return next(iter(self._standing(fits)), None)

    def remember(self, peer: AnyPeer, token_ids: Sequence[int], tenant: str = "") -> None:
        """Note that a peer has the rows of these tokens, so that the tenant's next request is best placed there."""
        if len(self._peers) > 1:
            self._prefixes.remember(peer, token_ids, tenant)

    def is_willing(self, fits: Fits[AnyPeer] = fits_any) -> bool:
        """Whether some peer fits a session and has not refused one lately."""
        return bool(self._willing(fits))

    def note_refusal(self, peer: AnyPeer, error: PacelineError) -> None:
        """Note that a peer whose link is up refused a session; other peers are preferred for a while."""
        pause_s = REFUSED_S if error.retry_after_ms is None else error.retry_after_ms / 1e3
        peer.refusal, peer.refuses_until = error, clock.now() + pause_s

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until a link stands.

        Raises:
            VocabularyMismatch, ProtocolMismatch: the only peer is up and doesn't fit; raised at once.
            PeerUnavailable: no peer came up in time; it names the peers and the reasons.
        """
        await self._wait(lambda: bool(self._standing(fits_any)), timeout_s, fits_any)

    async def wait_willing(self, timeout_s: float, fits: Fits[AnyPeer]) -> None:
        """Wait until some peer fits a session and has not refused one lately. Raises as `wait_up`."""
        await self._wait(lambda: self.is_willing(fits), timeout_s, fits)

    async def wait_to_retry(self, error: PacelineError, retries: Retries, left_s: float, fits: Fits[AnyPeer]) -> None:
        """Wait until a session may be opened again.

        Where all peers have refused it for want of room, the retry counts against the budget. A wait for a link does
        not: all sessions of the link wait for it together, and it comes up once.

        Raises:
            PacelineError: no peer takes the session in time.
        """
        deadline = clock.now() + max(0.0, left_s)
        if isinstance(error, Overloaded) and not self.is_willing(fits):
            for pause_s in retries.pauses(error, max(0.0, left_s)):
                await asyncio.sleep(pause_s)
        await self.wait_willing(max(0.0, deadline - clock.now()), fits)

    def why_none(self, fits: Fits[AnyPeer] = fits_any) -> PacelineError:
        """The error to raise where no peer takes a session."""
        if not self._peers:
            return PeerUnavailable(f"no {self.role} is known ({self.sources})", metadata={"peer": self.role})
        reasons = [self._why_not(peer, fits) for peer in self._peers]
        if len(reasons) == 1:
            return reasons[0]
        messages = "; ".join(reason.message for reason in reasons[:MOST_NAMED])
        return PeerUnavailable(
            f"none of {len(reasons)} {self.role}s takes the session: {messages}", metadata={"peer": self.role}
        )

    async def _wait(self, is_ready: Callable[[], bool], timeout_s: float, fits: Fits[AnyPeer]) -> None:
        deadline = clock.now() + timeout_s
        while True:
            next_try_s = self._next_try_s()  # before `is_ready`, which then sees a pause that ends meanwhile
            if is_ready():
                return
            left_s = deadline - clock.now()
            misfits = [peer.link.is_refused for peer in self._peers]
            if left_s <= 0 or (misfits and all(misfits)):
                raise self.why_none(fits)
            self._change.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, next_try_s)):
                    await self._change.wait()

    def _standing(self, fits: Fits[AnyPeer]) -> list[AnyPeer]:
        return [peer for peer in self._peers if peer.link.is_up and self._admits(peer) and fits(peer)]

    def _willing(self, fits: Fits[AnyPeer]) -> list[AnyPeer]:
        now = clock.now()
        return [peer for peer in self._standing(fits) if now >= peer.refuses_until]

    def _admits(self, peer: AnyPeer) -> bool:
        """Whether the pool uses a peer that is up, for any session."""
        return True

    def _next_try_s(self) -> float:
        """Seconds until the first peer that refused a session may be asked again."""
        now = clock.now()
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
