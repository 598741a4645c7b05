"""The targets of a coordinator, all of one model."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from coordinator.sessions.peer import Peer
from coordinator.sessions.pool import Pool
from paceline.costs.service_costs import TargetCosts
from paceline.protocol.target import TargetCommand, TargetEvent

ANY_VOCABULARY = 1 << 32
"""Every id of the wire is below it."""
logger = logging.getLogger(__name__)


class TargetPeer(Peer[TargetCommand, TargetEvent]):
    """The link to a target."""

    @property
    def costs(self) -> TargetCosts:
        """What the target's steps take, as it said last; unknown lines where it said nothing."""
        costs: TargetCosts = self.link.costs
        return costs


class TargetPool(Pool[TargetPeer]):
    """The targets, all of one model, and how patient rounds are with them.

    The model is that of the first target that came up, as long as any of them has it: targets of another model are
    not used, since their texts are not this model's.
    """

    def __init__(
        self,
        peers: Iterable[TargetPeer] = (),
        *,
        round_timeout_s: float,
        wait_s: float,
        vocab_size: int = ANY_VOCABULARY,
    ) -> None:
        super().__init__("target", peers)
        self.vocab_size = vocab_size
        self.round_timeout_s = round_timeout_s
        self.wait_s = wait_s
        self._model: str | None = None
        self._left_out: set[tuple[str, str]] = set()

    def _admits(self, peer: TargetPeer) -> bool:
        models = [welcome.fingerprint.model for each in self.peers if (welcome := each.link.welcome) is not None]
        if self._model not in models:
            self._model = models[0]
        assert peer.link.welcome is not None
        found = peer.link.welcome.fingerprint.model
        if found == self._model:
            return True
        if (peer.link.address, found) not in self._left_out:
            self._left_out.add((peer.link.address, found))
            logger.warning(
                "target of another model, left out: address=%s model=%s expected=%s",
                peer.link.address, found, self._model,
            )  # fmt: skip
        return False
