"""The draft services of a coordinator, or of a client that drafts for another server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from paceline.costs.service_costs import DEFAULT, DraftCosts
from paceline.protocol.draft import Commit, DraftCommand, DraftEvent, Verifying
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.rpc.peer_pool import Peer, Pool


class DraftPeer(Peer[DraftCommand, DraftEvent]):
    """The link to a draft service."""

    @property
    def costs(self) -> DraftCosts:
        """The latest costs that the draft service has stated; before that an unknown line."""
        costs: DraftCosts = self.link.costs
        return costs

    def has(self, drafter: str) -> bool:
        """Whether the draft service has a drafter; an empty name is its default."""
        welcome = self.link.welcome
        return not drafter or (welcome is not None and drafter in welcome.drafter_names)

    def need_of(self, drafter: str) -> FeatureNeed:
        """The hidden states of the target that a drafter reads."""
        welcome = self.link.welcome
        return NO_FEATURES if welcome is None else welcome.need_of(drafter)

    def send(self, command: DraftCommand) -> None:
        """Queue a command. Raises as the link's `send`."""
        self.link.send(command, urgent=isinstance(command, Commit | Verifying))


class DraftPool(Pool[DraftPeer]):
    """The draft services, of one or several drafters, and how long a round may wait for one."""

    def __init__(self, peers: Iterable[DraftPeer] = (), *, timeout_s: float, vocab_size: int) -> None:
        super().__init__("draft", peers)
        self.timeout_s = timeout_s
        self.vocab_size = vocab_size

    def offers(self, may_read: Callable[[FeatureNeed], bool]) -> Iterator[tuple[str, str, DraftPeer]]:
        """Each drafter of the services that are up: its name, empty for a default, its service's model, the service.

        `may_read` says whether the request can get the features that a drafter reads; others are left out.
        """
        for peer in self.peers:
            welcome = peer.link.welcome if peer.link.is_up else None
            if welcome is not None:
                names = (DEFAULT, *welcome.drafters[1:])
                model = welcome.fingerprint.model
                yield from ((name, model, peer) for name in names if may_read(welcome.need_of(name)))
