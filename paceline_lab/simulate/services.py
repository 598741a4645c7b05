"""What the sessions of a simulated run share: the clock, the services, the ways between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from paceline.protocol.errors import require
from paceline_lab.simulate.coordinator import CoordinatorProcess
from paceline_lab.simulate.draft import SimulatedDraft
from paceline_lab.simulate.events import Agenda
from paceline_lab.simulate.rounds import RequestTotals
from paceline_lab.simulate.specs import CellLayout
from paceline_lab.simulate.target import SimulatedTarget

if TYPE_CHECKING:
    from paceline_lab.simulate.policies import Policy, SessionPolicy


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
class ServiceFailure:
    """A service ends at a moment and is there again, empty, `down_ms` later."""

    at_ms: float
    service: str
    index: int
    down_ms: float

    def __post_init__(self) -> None:
        services = ("target", "draft", "coordinator")
        require(self.service in services, "service", self.service, f"one of {', '.join(services)}")
        require(self.index >= 0, "index", self.index, "at least 0")


@dataclass(frozen=True)
class Disturbance:
    """What goes wrong in a run.

    Attributes:
        changes: services that become slower or faster.
        target_lie, draft_lie: by how much the lines that services state at their start are wrong.
        failures: services that end and come back.
        notice_ms: from a failure until those who are linked to the service know: a closed connection at once, a
            silent host after the keepalive's 7 s.
    """

    changes: tuple[ServiceChange, ...] = ()
    target_lie: float = 1.0
    draft_lie: float = 1.0
    failures: tuple[ServiceFailure, ...] = ()
    notice_ms: float = 1.0


UNDISTURBED = Disturbance()


class SimulatedServices:
    """What all sessions of a run share."""

    def __init__(
        self, layout: CellLayout, policies: Sequence[Policy], disturbance: Disturbance = UNDISTURBED
    ) -> None:
        self.agenda = agenda = Agenda()
        self.layout = layout
        self.targets = [SimulatedTarget(agenda, spec, disturbance.target_lie) for spec, _ in layout.targets]
        for target in self.targets[len(self.targets) - layout.idle_targets :]:
            target.is_up = False
        shared = self.targets[0] if layout.targets[0][0].shares_cores else None
        works: Callable[[bool], None] = shared.draft_works if shared is not None else _no_one_minds
        self.drafts = [SimulatedDraft(agenda, spec, works, disturbance.draft_lie) for spec, _ in layout.drafts]
        random = Random(layout.seed)  # noqa: S311 - delays are no secret
        self.coordinators = [
            CoordinatorProcess(agenda, self.targets, self.drafts, layout, random) for _ in range(layout.coordinators)
        ]
        self._policies = {home: policies[n % len(policies)] for n, home in enumerate(self.coordinators)}
        self.notice_ms = disturbance.notice_ms
        self.waiting: deque[Callable[[None], None]] = deque()
        """Requests that begin when others have ended."""
        self.on_ended: Callable[[RequestTotals], None] = lambda _: None
        self.tally: Callable[[float, int], None] | None = None
        """Told of committed tokens as they come, where somebody counts them by time."""
        self._disturb(disturbance)

    def ended(self, totals: RequestTotals) -> None:
        """A request has ended: the next one that waits for that begins."""
        self.on_ended(totals)
        if self.waiting:
            self.agenda.at(self.agenda.now, self.waiting.popleft())

    def session_policy(self, home: CoordinatorProcess) -> SessionPolicy:
        """Of a new session of a coordinator."""
        return self._policies[home].session(home)

    def another_home(self) -> CoordinatorProcess | None:
        """The coordinator with the fewest requests of those that take another; None: there is none."""
        up = [each for each in self.coordinators if each.has_room]
        return min(up, key=lambda each: len(each.sessions), default=None)

    def _of(self, service: str) -> Sequence[SimulatedTarget | SimulatedDraft | CoordinatorProcess]:
        if service == "target":
            return self.targets
        return self.drafts if service == "draft" else self.coordinators

    def _disturb(self, disturbance: Disturbance) -> None:
        for change in disturbance.changes:
            services: Sequence[SimulatedTarget | SimulatedDraft]
            services = self.targets if change.service == "target" else self.drafts
            for each in services:
                self.agenda.at(change.at_ms, each.slower, change.factor)
        for failure in disturbance.failures:
            found = self._of(failure.service)
            require(failure.index < len(found), "index", failure.index, f"below {len(found)} {failure.service}s")
            self.agenda.at(failure.at_ms, _fail, found[failure.index])
            self.agenda.at(failure.at_ms + failure.down_ms, _again, found[failure.index])


def _fail(service: SimulatedTarget | SimulatedDraft | CoordinatorProcess) -> None:
    service.fail()


def _again(service: SimulatedTarget | SimulatedDraft | CoordinatorProcess) -> None:
    service.is_up = True


def _no_one_minds(works: bool) -> None:
    """The draft has cores of its own."""
