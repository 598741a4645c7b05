"""The ways between simulated processes: messages of one link arrive in the order in which they were sent."""

from __future__ import annotations

from random import Random

from paceline_lab.simulate.events import Agenda
from paceline_lab.simulate.specs import Delay


class LinkDirection:
    """One direction of a link. What is sent at one moment travels together, as in one frame."""

    __slots__ = ("_agenda", "_arrives", "_ms", "_random", "_sent", "_sigma")

    def __init__(self, agenda: Agenda, delay: Delay, random: Random) -> None:
        self._agenda = agenda
        self._ms, self._sigma = delay.ms, delay.sigma
        self._random = random
        self._sent = -1.0
        self._arrives = 0.0

    def arrives(self) -> float:
        """When a message arrives that is sent now."""
        now = self._agenda.now
        if not self._sigma:
            return now + self._ms
        if now != self._sent:
            self._sent = now
            drawn_ms = self._ms * self._random.lognormvariate(0.0, self._sigma)
            self._arrives = max(self._arrives, now + drawn_ms)
        return self._arrives


class Route:
    """Both directions of a link; `ms`: what one takes usually."""

    __slots__ = ("back", "ms", "there")

    def __init__(self, agenda: Agenda, delay: Delay, random: Random) -> None:
        self.there, self.back = LinkDirection(agenda, delay, random), LinkDirection(agenda, delay, random)
        self.ms = delay.ms
