"""A simulated coordinator: its own time, its peers, and where it places sessions, by the coordinator's own rule."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar

from coordinator.sessions.placement import PrefixMemory, choose
from paceline_lab.simulate.events import Agenda
from paceline_lab.simulate.specs import CellLayout
from paceline_lab.simulate.ways import Route

if TYPE_CHECKING:
    from paceline_lab.simulate.draft import SimulatedDraft
    from paceline_lab.simulate.target import SimulatedTarget


class LoadedService(Protocol):
    """A service that sessions are placed on."""

    def __hash__(self) -> int:
        """By identity."""

    @property
    def load(self) -> int:
        """Sessions there, of all coordinators."""


AnyService = TypeVar("AnyService", bound=LoadedService)


class PlacedRequest(Protocol):
    """What placement looks at: the prompt's tokens, and whose they are."""

    @property
    def prefix(self) -> Sequence[int]:
        """The prompt, as far as others may share it."""

    @property
    def tenant(self) -> str:
        """Prefixes are shared within one."""


class MovedSession(Protocol):
    """A session of a coordinator."""

    def home_lost(self) -> None:
        """The coordinator has failed."""


class CoordinatorProcess:
    """One coordinator. Its sessions' verdicts are dealt with one after the other."""

    def __init__(
        self,
        agenda: Agenda,
        targets: Sequence[SimulatedTarget],
        drafts: Sequence[SimulatedDraft],
        layout: CellLayout,
        random: Random,
    ) -> None:
        self.layout = layout
        self.is_up = True
        self.sessions: dict[int, MovedSession] = {}
        self.busy_ms = 0.0
        self._agenda = agenda
        self._random = random
        self._free = 0.0
        self._to_targets = {
            t: Route(self._agenda, d, random) for t, (_, d) in zip(targets, layout.targets, strict=True)
        }
        self._to_drafts = {t: Route(self._agenda, d, random) for t, (_, d) in zip(drafts, layout.drafts, strict=True)}
        self._target_prefixes, self._draft_prefixes = PrefixMemory(), PrefixMemory()

    @property
    def has_room(self) -> bool:
        """Whether it takes another request."""
        return self.is_up and len(self.sessions) < self.layout.max_requests

    def free_at(self) -> float:
        """When a verdict that has come now is dealt with."""
        own_ms = self.layout.coordinator_ms
        self._free = max(self._free, self._agenda.now) + own_ms
        self.busy_ms += own_ms
        return self._free

    def place_target(self, request: PlacedRequest) -> SimulatedTarget | None:
        """The target for a request; None: none is up."""
        up = [target for target in self._to_targets if target.is_up and not target.drains]
        return self._place(up, request, self._target_prefixes)

    def place_draft(self, request: PlacedRequest) -> SimulatedDraft | None:
        """The draft service for a request; None: none is up."""
        return self._place([draft for draft in self._to_drafts if draft.is_up], request, self._draft_prefixes)

    def route_to_target(self, target: SimulatedTarget) -> Route:
        """The link to it."""
        return self._to_targets[target]

    def route_to_draft(self, draft: SimulatedDraft) -> Route:
        """The link to it."""
        return self._to_drafts[draft]

    def fail(self) -> None:
        """It ends; its sessions find out."""
        self.is_up = False
        lost, self.sessions = [*self.sessions.values()], {}
        for session in lost:
            session.home_lost()

    def _place(self, up: list[AnyService], request: PlacedRequest, memory: PrefixMemory) -> AnyService | None:
        if len(up) <= 1:
            return up[0] if up else None
        if self.layout.placement == "random":
            return self._random.choice(up)
        loads = {peer: peer.load for peer in up}
        if self.layout.placement == "least" or not request.prefix:
            return choose(loads, dict.fromkeys(up, 0))
        found = choose(loads, memory.longest(up, request.prefix, request.tenant))
        memory.remember(found, request.prefix, request.tenant)
        return found
