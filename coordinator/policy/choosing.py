"""Which of several drafters serves a request best: the one whose rounds would be fastest by what is known.

Each is judged by the best that it may turn out to be (`Seen.hoped`; an upper confidence bound, as bandits are played:
Auer, Cesa-Bianchi and Fischer 2002, §2), so each is tried before it is passed over, and the account bounds what that
costs. A request that knows its own drafter better than the average of other
requests did leaves it where the text that is left would be written sooner, the time to catch up included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from coordinator.policy.cycles import Cycles
from coordinator.policy.planner import RATES_KEPT, DraftPeerCosts, Planner, RequestPlanner
from coordinator.policy.round_times import DraftTimes, TargetTimes
from coordinator.policy.seen import MAX_DEPTH, Seen
from paceline.costs.service_costs import DEFAULT
from paceline.protocol.proposal import AUTO

ROUNDS_BETWEEN = RATES_KEPT
"""Rounds from one look at the other drafters to the next."""


@dataclass(frozen=True)
class Offered:
    """A drafter on offer.

    Attributes:
        name: as its service calls it; empty: the default.
        known_as: with the service's model: what is known of it is kept under this.
    """

    name: str
    known_as: str


@dataclass(frozen=True)
class Offer:
    """What drafting with one of them would take, and what may be hoped of its tokens."""

    offered: Offered
    draft: DraftTimes
    seen: Seen


class Choosing:
    """The drafter of one request, among all on offer.

    Args:
        planner: what all requests share.
        request: the request's own.
        on_offer: name, service's model and service of those on offer now, a default first.
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

    def first(self) -> Offered | None:
        """The drafter to begin with; None: none is on offer."""
        offers = self._offers()
        target = self._request.target
        if target is None or len(offers) < 2:
            return offers[0].offered if offers else None
        return max(offers, key=lambda offer: rate_with(target, offer, can_ahead=self._can_ahead)).offered

    def other(self, current: str, length: int, room: int) -> Offered | None:
        """The drafter to change to, once a round; None: the current one stays.

        Args:
            current: name of the drafter at work.
            length: tokens that another one has to compute first.
            room: tokens that are left to write.
        """
        self._rounds += 1
        target = self._request.target
        if self._rounds % ROUNDS_BETWEEN or target is None:
            return None
        offers = {offer.offered.name: offer for offer in self._offers()}
        own = offers.pop(current, None)
        if own is None or not offers:
            return None
        best = max(offers.values(), key=lambda offer: rate_with(target, offer, can_ahead=self._can_ahead))
        left_ms = room / rate_with(target, own, can_ahead=self._can_ahead)
        others_ms = room / rate_with(target, best, can_ahead=self._can_ahead) + best.draft.step_ms(length)
        return best.offered if others_ms < left_ms else None

    def _offers(self) -> list[Offer]:
        found: dict[str, Offer] = {}
        for name, model, peer in self._on_offer():
            if name not in found:
                offered = Offered(name, known_as(AUTO if name == DEFAULT else f"{AUTO} {name}", model, self._text))
                hoped = self._request.hoped_of(offered.known_as)
                found[name] = Offer(offered, self._planner.draft(peer, name), hoped)
        return list(found.values())


def known_as(drafter: str, model: str, text: str) -> str:
    """Under which name what is known of a drafter is kept."""
    return " ".join(filter(None, (drafter, model, text)))


def rate_with(target: TargetTimes, offer: Offer, *, can_ahead: bool) -> float:
    """Tokens a millisecond of a request in the best way to run rounds, where all who share the target follow it."""
    cycles = Cycles(target, offer.draft, offer.seen, MAX_DEPTH, can_ahead=can_ahead)
    return cycles.together(target.sessions).rate
