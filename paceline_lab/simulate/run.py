"""One simulated run: a setting, requests, a policy; what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.protocol.errors import require
from paceline_lab.simulate.policies import ConstantPolicy, Policy
from paceline_lab.simulate.rounds import RequestTotals
from paceline_lab.simulate.services import UNDISTURBED, Disturbance, SimulatedServices
from paceline_lab.simulate.session import SimulatedSession
from paceline_lab.simulate.specs import CellLayout
from paceline_lab.simulate.trace import TracedRequest, TracedSetting

TARGET_ONLY_POLICY = ConstantPolicy(0)


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
    replicas: int = 1,
) -> SimulatedRun:
    """Run requests until all have ended. Several policies: coordinators of their own, which take requests in turn.

    `replicas`: targets, and as many draft services, that are alike.
    """
    makers = tuple(policies) if isinstance(policies, Sequence) else (policies,)
    world = SimulatedServices(CellLayout.of(setting, len(makers), replicas), makers, disturbance)
    homes = world.coordinators
    sessions = [
        SimulatedSession(number, each, homes[number % len(homes)], world) for number, each in enumerate(requests)
    ]
    at_once = setting.concurrency
    for session in sessions[:at_once] if at_once else sessions:
        world.agenda.at(0.0 if at_once else session.totals.arrival_ms, session.arrive)
    world.waiting.extend(session.arrive for session in (sessions[at_once:] if at_once else ()))
    world.agenda.run()
    ran_ms = max(1e-9, world.agenda.now)
    return SimulatedRun(
        makers[0].name,
        tuple(session.totals for session in sessions),
        sum(each.steps for each in world.targets),
        sum(each.steps for each in world.drafts),
        sum(each.busy_ms for each in world.targets) / (ran_ms * len(world.targets)),
        sum(each.busy_ms for each in world.drafts) / (ran_ms * max(1, len(world.drafts))),
    )


def best_of(runs: Iterable[SimulatedRun]) -> SimulatedRun:
    """The run of greatest goodput."""
    return max(runs, key=lambda run: run.tokens_per_second)


def concurrent(requests: Sequence[TracedRequest], sessions: int) -> tuple[TracedRequest, ...]:
    """So many requests at once: those of a trace, again and again, all arriving at the start."""
    require(sessions >= 1, "sessions", sessions, "at least 1")
    return tuple(replace(requests[number % len(requests)], arrival_ms=0.0) for number in range(sessions))
