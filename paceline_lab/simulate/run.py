"""One simulated run: a setting, requests, a policy; what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.protocol.errors import require
from paceline_lab.simulate.disturbances import UNDISTURBED, Disturbance
from paceline_lab.simulate.policies import Policy
from paceline_lab.simulate.requests import RequestRun, RequestTotals
from paceline_lab.simulate.script import Scripts
from paceline_lab.simulate.services import SimulatedCell
from paceline_lab.simulate.specs import CellLayout
from paceline_lab.simulate.trace import TracedRequest, TracedSetting
from paceline_lab.simulate.virtual_time import run_virtually


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
        later_tokens = sum(each.tokens - each.first_tokens for each in self.requests)
        return 1e3 * later_tokens / max(1e-9, sum(each.end_ms - each.first_ms for each in self.requests))

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
    by_coordinator = tuple(policies) if isinstance(policies, Sequence) else (policies,)
    layout = CellLayout.of(setting, len(by_coordinator), replicas)
    return run_virtually(lambda: _run(layout, requests, by_coordinator, disturbance, setting.concurrency))


async def _run(
    layout: CellLayout,
    requests: Sequence[TracedRequest],
    policies: Sequence[Policy],
    disturbance: Disturbance,
    concurrency: int,
) -> SimulatedRun:
    cell = SimulatedCell(layout, policies, Scripts(), disturbance)
    await cell.start()
    totals: dict[int, RequestTotals] = {}

    async def ask(number: int) -> None:
        home = cell.coordinators[number % len(cell.coordinators)]
        totals[number] = await RequestRun(cell, number, requests[number]).run(home)

    async def ask_in_turn(numbers: Iterator[int]) -> None:
        for number in numbers:
            await ask(number)

    async def ask_at(number: int) -> None:
        await asyncio.sleep(requests[number].arrival_ms / 1e3)
        await ask(number)

    numbers = iter(range(len(requests)))
    turns = [ask_in_turn(numbers) for _ in range(concurrency)] or [ask_at(number) for number in numbers]
    await asyncio.gather(*turns)
    ran_s = max(1e-9, cell.now_ms / 1e3)
    return SimulatedRun(
        policies[0].name,
        tuple(totals[number] for number in range(len(requests))),
        sum(each.steps for each in cell.targets),
        sum(each.steps for each in cell.drafts),
        sum(each.executor.busy_s for each in cell.targets) / (ran_s * len(cell.targets)),
        sum(each.executor.busy_s for each in cell.drafts) / (ran_s * max(1, len(cell.drafts))),
    )


def best_of(runs: Iterable[SimulatedRun]) -> SimulatedRun:
    """The run of greatest goodput."""
    return max(runs, key=lambda run: run.tokens_per_second)


def concurrent(requests: Sequence[TracedRequest], sessions: int) -> tuple[TracedRequest, ...]:
    """So many requests at once: those of a trace, again and again, all arriving at the start."""
    require(sessions >= 1, "sessions", sessions, "at least 1")
    return tuple(replace(requests[number % len(requests)], arrival_ms=0.0) for number in range(sessions))
