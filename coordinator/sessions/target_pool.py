"""The targets of a coordinator, all of one model."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline.costs.service_costs import TargetCosts
from paceline.protocol.target import TargetCommand, TargetEvent
from paceline.rpc.peer_pool import Peer, Pool

ANY_VOCABULARY = 1 << 32
"""Above every token id that the wire can carry."""
logger = logging.getLogger(__name__)


class TargetPeer(Peer[TargetCommand, TargetEvent]):
    """The link to a target."""

    @property
    def costs(self) -> TargetCosts:
        """The latest costs that the target has stated; before that unknown lines."""
        costs: TargetCosts = self.link.costs
        return costs


class TargetPool(Pool[TargetPeer]):
    """The targets, all of one model, and how long rounds wait for them.

    The model is that of the first target that came up, as long as any target has it. Targets of another model are not
    used, since their texts are not this model's.
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
        self._foreign_models: set[tuple[str, str]] = set()

    def _admits(self, peer: TargetPeer) -> bool:
        models = [welcome.fingerprint.model for each in self.peers if (welcome := each.link.welcome) is not None]
        if self._model not in models:
            self._model = models[0]
        assert peer.link.welcome is not None
        model = peer.link.welcome.fingerprint.model
        if model == self._model:
            return True
        if (peer.link.address, model) not in self._foreign_models:
            self._foreign_models.add((peer.link.address, model))
            logger.warning(
                "target of another model, left out: address=%s model=%s expected=%s",
                peer.link.address, model, self._model,
            )  # fmt: skip
        return False
