"""The choice among several drafters: the one whose rounds would be fastest by what is known.

Each is judged by an upper confidence bound (Auer, Cesa-Bianchi and Fischer 2002, §2), and so tried before it is
passed over; the loss budget bounds the cost. A request changes where the rest of its text would be written sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from coordinator.policy.cycles import Cycles
from coordinator.policy.planner import RequestPlanner
from coordinator.policy.round_times import DraftTimes
from paceline.costs.goodput import Mode
from paceline.costs.running_mean import SPEED_MEMORY
from paceline.costs.service_costs import DEFAULT, DraftPeerCosts
from paceline.protocol.proposal import AUTO


@dataclass(frozen=True)
class OfferedDrafter:
    """A drafter that a draft service offers.

    Attributes:
        name, stats_key: its service's name for it, empty: the default; and the name of its acceptance statistics.
        draft: its times.
        rate: tokens a millisecond by an upper bound of its acceptance, where all follow its best way; 0: unknown.
    """

    name: str
    stats_key: str
    draft: DraftTimes
    rate: float


@dataclass(frozen=True)
class Choosing:
    """The drafter of one request, among all on offer.

    Attributes:
        request: its planner.
        on_offer: lists the drafters offered now: name, service's model and service; a default first.
        text, can_ahead: its kind of text, if it is of one; whether outcomes may be drafted for.
    """

    request: RequestPlanner
    on_offer: Callable[[], Iterable[tuple[str, str, DraftPeerCosts]]]
    text: str
    can_ahead: bool

    def first(self) -> OfferedDrafter | None:
        """The drafter to begin with; None: none is on offer."""
        return max(self._offers(), key=attrgetter("rate"), default=None)

    def other(self, current: str, length: int, room: int) -> OfferedDrafter | None:
        """The drafter to change to, once a round, where `room` tokens are left; None: the `current` one stays.

        Another one has to compute `length` tokens first.
        """
        if self.request.rounds % SPEED_MEMORY or self.request.target is None or self.request.mode is not Mode.DRAFTS:
            return None
        offers = self._offers()
        if (own := next((offer for offer in offers if offer.name == current), None)) is None:
            return None
        best = max(offers, key=attrgetter("rate"))
        # The times that what is left takes with each, times both rates, of which either may be 0.
        return best if own.rate * (room + best.draft.step_ms(length) * best.rate) < room * best.rate else None

    def _offers(self) -> list[OfferedDrafter]:
        on_offer, offers = [*self.on_offer()], dict[str, OfferedDrafter]()
        target = self.request.target if len({name for name, _, _ in on_offer}) > 1 else None
        for name, model, peer in on_offer:
            if name not in offers:
                key = stats_key(AUTO if name == DEFAULT else f"{AUTO} {name}", model, self.text)
                draft, stats = self.request.planner.draft(peer, name), self.request.stats.optimistic(key)
                cycles = Cycles(target, draft, stats, can_ahead=self.can_ahead).all() if target is not None else {}
                rate = max((cycle.rate for cycle in cycles.values()), default=0.0)
                offers[name] = OfferedDrafter(name, key, draft, rate)
        return list(offers.values())


def stats_key(drafter: str, model: str, text: str) -> str:
    """The name under which a drafter's acceptance statistics are kept."""
    return " ".join(filter(None, (drafter, model, text)))
