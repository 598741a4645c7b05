"""One simulated run: a setting, requests, a policy; what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulator.draft import SimulatedDraft
from benchmarks.simulator.events import Agenda
from benchmarks.simulator.policies import ConstantPolicy, Policy
from benchmarks.simulator.rounds import RequestTotals
from benchmarks.simulator.session import SimulatedSession
from benchmarks.simulator.target import SimulatedTarget
from benchmarks.simulator.trace import TracedRequest, TracedSetting
from paceline.protocol.errors import require

TARGET_ONLY_POLICY = ConstantPolicy(0)


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
        self.waiting: deque[SimulatedSession] = deque()
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
            self.agenda.at(self.agenda.now, self.waiting.popleft().arrive)

    def coordinator_free(self) -> float:
        """When a verdict that has come now is dealt with."""
        self._coordinator_free = max(self._coordinator_free, self.agenda.now) + self._coordinator_ms
        return self._coordinator_free


@dataclass(frozen=True)
class SimulatedRun:
    """What became of the requests, in their order."""

    policy: str
    requests: tuple[RequestTotals, ...]
    target_steps: int
    draft_steps: int
    target_busy: float
    draft_busy: float

    @property
    def tokens(self) -> int:
        """Of all requests."""
        return sum(request.tokens for request in self.requests)

    @property
    def rounds(self) -> int:
        """Of all requests."""
        return sum(request.rounds for request in self.requests)

    @property
    def milliseconds(self) -> float:
        """From the first arrival to the last token."""
        return max(each.end_ms for each in self.requests) - min(each.arrival_ms for each in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Goodput: all tokens over all of the time."""
        return 1e3 * self.tokens / self.milliseconds if self.milliseconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Of one request, behind its first round: all tokens over the sum of all requests' times."""
        decoded = sum(each.tokens - each.first_tokens for each in self.requests)
        return 1e3 * decoded / max(1e-9, sum(each.end_ms - each.first_ms for each in self.requests))

    @property
    def slowest_ms_per_token(self) -> float:
        """Of the slowest request, behind its first round."""
        return max(each.ms_per_token for each in self.requests)

    def least_over(self, other: SimulatedRun) -> float:
        """The request that gains least, or loses most, beside another run of the same: its speed over the other's."""
        return min(
            theirs.ms_per_token / mine.ms_per_token if mine.ms_per_token else 1.0
            for mine, theirs in zip(self.requests, other.requests, strict=True)
        )


def simulate(
    setting: TracedSetting,
    requests: Sequence[TracedRequest],
    policies: Policy | Sequence[Policy],
    disturbance: Disturbance = UNDISTURBED,
) -> SimulatedRun:
    """Run requests until all have ended. Several policies: coordinators of their own, which take requests in turn."""
    world = SimulatedServices(setting, disturbance)
    makers = tuple(policies) if isinstance(policies, Sequence) else (policies,)
    sessions: list[SimulatedSession] = []
    for number, request in enumerate(requests):
        policy = makers[number % len(makers)].session(world)
        sessions.append(SimulatedSession(number, request, policy, world))
    at_once = setting.concurrency
    for session in sessions[:at_once] if at_once else sessions:
        world.agenda.at(0.0 if at_once else session.totals.arrival_ms, session.arrive)
    world.waiting.extend(sessions[at_once:] if at_once else ())
    world.agenda.run()
    draft = world.draft
    return SimulatedRun(
        makers[0].name,
        tuple(session.totals for session in sessions),
        world.target.steps,
        draft.steps if draft else 0,
        world.target.busy_ms / max(1e-9, world.agenda.now),
        draft.busy_ms / max(1e-9, world.agenda.now) if draft else 0.0,
    )


def best_of(runs: Iterable[SimulatedRun]) -> SimulatedRun:
    """The run of greatest goodput."""
    return max(runs, key=lambda run: run.tokens_per_second)


def concurrent(requests: Sequence[TracedRequest], sessions: int) -> tuple[TracedRequest, ...]:
    """So many requests at once: those of a trace, again and again, all arriving at the start."""
    require(sessions >= 1, "sessions", sessions, "at least 1")
    return tuple(replace(requests[number % len(requests)], arrival_ms=0.0) for number in range(sessions))


def _no_one_minds(works: bool) -> None:
    """The draft has cores of its own."""
