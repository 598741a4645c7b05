"""The choice among several drafters: the one whose rounds would be fastest by what is known.

Each is judged by an upper confidence bound (`AcceptanceStats.upper_bound`; bandits are played so: Auer, Cesa-Bianchi
and Fischer 2002, §2). So each is tried before it is passed over, and the loss budget bounds the cost of that. A
request changes to another drafter where the rest of its text would be written sooner, the time to catch up included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter

from coordinator.policy.acceptance_stats import AcceptanceStats
from coordinator.policy.cycles import Cycles
from coordinator.policy.group import Mode
from coordinator.policy.planner import RATES_KEPT, Planner, RequestPlanner
from coordinator.policy.round_times import DraftPeerCosts, DraftTimes, TargetTimes
from paceline.costs.service_costs import DEFAULT
from paceline.protocol.proposal import AUTO

ROUNDS_BETWEEN = RATES_KEPT
"""Rounds from one look at the other drafters to the next."""


@dataclass(frozen=True)
class OfferedDrafter:
    """A drafter that a draft service offers.

    Attributes:
        name: as its service calls it; empty: the default.
        stats_key: the name under which its acceptance statistics are kept.
    """

    name: str
    stats_key: str


@dataclass(frozen=True)
class Offer:
    """A drafter with its times and an upper bound of its acceptance."""

    drafter: OfferedDrafter
    draft: DraftTimes
    stats: AcceptanceStats

    def rate(self, target: TargetTimes, *, can_ahead: bool) -> float:
        """Tokens a millisecond of a request under the best strategy, where all who share the target follow it."""
        cycles = Cycles(target, self.draft, self.stats, can_ahead=can_ahead)
        return cycles.best(target.sessions)[1].rate


class Choosing:
    """The drafter of one request, among all on offer.

    Args:
        planner: what all requests share.
        request: the request's own.
        on_offer: lists the drafters offered now: name, service's model and service; a default first.
        text: what kind of text it is, if it is of a kind.
        can_ahead: whether outcomes may be drafted for.
    """

    def __init__(
        self,
        planner: Planner,
        request: RequestPlanner,
        on_offer: Callable[[], Iterable[tuple[str, str, DraftPeerCosts]]],
        text: str = "",
        *,
        can_ahead: bool,
    ) -> None:
        self._planner = planner
        self._request = request
        self._on_offer = on_offer
        self._text = text
        self._can_ahead = can_ahead
        self._rounds = 0

    def first(self) -> OfferedDrafter | None:
        """The drafter to begin with; None: none is on offer."""
        offers = self._offers()
        target = self._request.target
        if target is None or len(offers) < 2:
            return offers[0].drafter if offers else None
        return max(offers, key=lambda offer: offer.rate(target, can_ahead=self._can_ahead)).drafter

    def other(self, current: str, length: int, room: int) -> OfferedDrafter | None:
        """The drafter to change to, once a round; None: the current one stays.

        Args:
            current: name of the drafter at work.
            length: tokens that another one has to compute first.
            room: tokens that are left to write.
        """
        self._rounds += 1
        target = self._request.target
        if self._rounds % ROUNDS_BETWEEN or target is None or self._request.mode is not Mode.DRAFTS:
            return None
        offers = [(offer.rate(target, can_ahead=self._can_ahead), offer) for offer in self._offers()]
        own_rate = next((rate for rate, offer in offers if offer.drafter.name == current), None)
        others = [(rate, offer) for rate, offer in offers if offer.drafter.name != current]
        if own_rate is None or not others:
            return None
        rate, best = max(others, key=itemgetter(0))
        return best.drafter if room / rate + best.draft.step_ms(length) < room / own_rate else None

    def _offers(self) -> list[Offer]:
        offers: dict[str, Offer] = {}
        for name, model, peer in self._on_offer():
            if name not in offers:
                key = stats_key(AUTO if name == DEFAULT else f"{AUTO} {name}", model, self._text)
                stats = self._request.stats.optimistic(key)
                offers[name] = Offer(OfferedDrafter(name, key), self._planner.draft(peer, name), stats)
        return list(offers.values())


def stats_key(drafter: str, model: str, text: str) -> str:
    """The name under which a drafter's acceptance statistics are kept."""
    return " ".join(filter(None, (drafter, model, text)))
