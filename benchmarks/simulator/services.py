"""What the sessions of a simulated run share: the clock, the services, the ways between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulator.draft import SimulatedDraft
from benchmarks.simulator.events import Agenda
from benchmarks.simulator.target import SimulatedTarget
from benchmarks.simulator.trace import TracedSetting
from paceline.protocol.errors import require


@dataclass(frozen=True)
class ServiceChange:
    """From a moment on steps of a service take so many times as long."""

    at_ms: float
    service: str
    factor: float

    def __post_init__(self) -> None:
        require(self.service in ("target", "draft"), "service", self.service, "target or draft")
        require(self.factor > 0, "factor", self.factor, "above 0")


@dataclass(frozen=True)
class Disturbance:
    """What goes wrong in a run.

    Attributes:
        changes: services that become slower or faster.
        target_lie, draft_lie: by how much the lines that services state at their start are wrong.
    """

    changes: tuple[ServiceChange, ...] = ()
    target_lie: float = 1.0
    draft_lie: float = 1.0


UNDISTURBED = Disturbance()


class SimulatedServices:
    """What all sessions of a run share."""

    def __init__(self, setting: TracedSetting, disturbance: Disturbance = UNDISTURBED) -> None:
        self.agenda = agenda = Agenda()
        self.target = SimulatedTarget(agenda, setting, disturbance.target_lie)
        works: Callable[[bool], None] = self.target.draft_works if setting.shares_cores else _no_one_minds
        self.draft = SimulatedDraft(agenda, setting, works, disturbance.draft_lie) if setting.draft.is_known else None
        self.target_one_way_ms, self.draft_one_way_ms = setting.target_one_way_ms, setting.draft_one_way_ms
        self.lease, self.max_prefetched, self.fan_out = setting.lease, setting.max_prefetched, setting.fan_out
        self.waiting: deque[Callable[[None], None]] = deque()
        """Requests that begin when others have ended."""
        self._coordinator_ms = setting.coordinator_ms
        self._coordinator_free = 0.0
        for change in disturbance.changes:
            service = self.target if change.service == "target" else self.draft
            if service is not None:
                agenda.at(change.at_ms, service.slower, change.factor)

    def ended(self) -> None:
        """A request has ended: the next one that waits for that begins."""
        if self.waiting:
            self.agenda.at(self.agenda.now, self.waiting.popleft())

    def coordinator_free(self) -> float:
        """When a verdict that has come now is dealt with."""
        self._coordinator_free = max(self._coordinator_free, self.agenda.now) + self._coordinator_ms
        return self._coordinator_free


def _no_one_minds(works: bool) -> None:
    """The draft has cores of its own."""
