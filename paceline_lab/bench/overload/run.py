"""The phases of an overload: every place is taken, then ten times as many requests come, then it is as before."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.client import AsyncClient
from paceline.local.settings import local_settings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.proposal import NGRAM
from paceline_lab.bench.resources import ResourceWatch, Samples
from paceline_lab.bench.simulated_pair import OFF, request
from paceline_lab.bench.users import GrpcUsers, HttpUsers, RequestOutcome, UserRequest

TEXTS = 16
Ask = Callable[[int], Coroutine[None, None, UserRequest]]
"""Sends the request of a number."""
NORMAL, STORM, AFTER = "1 ×", "10 ×", "1 × again"


@dataclass(frozen=True)
class OverloadPlan:
    """Settings of an overload.

    Attributes:
        places: requests that the coordinator runs at once.
        times: requests that come in the storm, over what is served in the same time at 1 ×.
        normal_s: seconds with every place taken and nobody refused, before the storm and behind it.
        storm_s: seconds of the storm.
        step_ms: time of a step of the simulated target.
        tokens: length of each answer.
        seed: seed of the times at which requests come.
    """

    places: int = 16
    times: float = 10.0
    normal_s: float = 20.0
    storm_s: float = 180.0
    step_ms: float = 20.0
    tokens: int = 32
    seed: int = 1

    @property
    def model(self) -> str:
        """Return the target's model name."""
        return f"table:vocab=300,seed=1,eos=299,step_ms={self.step_ms:g}"


@dataclass
class Phase:
    """Requests of a phase, and its beginning and end, in seconds of `time.perf_counter`."""

    name: str
    began_s: float
    ended_s: float = 0.0
    requests: list[UserRequest] = field(default_factory=list)
    tasks: list[asyncio.Task[UserRequest]] = field(default_factory=list)
    """Requests whose ends nobody has waited for yet."""

    def take_in(self) -> None:
        """Take in the requests of the tasks, which have ended."""
        self.requests += [task.result() for task in self.tasks]
        self.tasks = []

    @property
    def seconds(self) -> float:
        """Return how long requests came."""
        return self.ended_s - self.began_s

    def of(self, outcome: RequestOutcome, protocol: str = "") -> list[UserRequest]:
        """Return requests with that outcome, over one protocol or over both."""
        return [each for each in self.requests if each.outcome is outcome and protocol in ("", each.protocol)]


@dataclass
class OverloadRun:
    """All phases, the processes' resources from the first to the last, and the seconds of each phase's end."""

    capacity: float
    phases: dict[str, Phase]
    resources: dict[str, Samples]
    ends_s: dict[str, float]

    @property
    def recovery_s(self) -> float:
        """Return the seconds from the storm's end until the last refusal behind it."""
        storm, after = self.phases[STORM], self.phases[AFTER]
        return max((each.ended_s - storm.ended_s for each in after.of(RequestOutcome.REFUSED)), default=0.0)


def overload_services(folder: Path, plan: OverloadPlan) -> SupervisedServices:
    """Return services to start: a target, a coordinator with few places, and a gateway."""
    settings, limits = local_settings(plan.model, NGRAM), {"max_concurrent_requests": plan.places}
    return SupervisedServices(settings, folder, coordinator=limits, opens_http=True)


async def overload(services: SupervisedServices, plan: OverloadPlan) -> OverloadRun:
    """Run all phases."""
    async with _users(services, plan) as users, _resource_watch(services) as watch:
        phases, ends_s = dict[str, Phase](), dict[str, float]()

        async def phase(name: str, comes: Awaitable[Phase]) -> Phase:
            phases[name] = await comes
            ends_s[name] = watch.now_s
            return phases[name]

        normal = await phase(NORMAL, run_steady(NORMAL, users, plan.places, plan.normal_s))
        capacity = len(normal.of(RequestOutcome.SERVED)) / normal.seconds
        async with asyncio.TaskGroup() as storm_requests:
            storm = await phase(
                STORM, run_storm(users, plan.times * capacity, plan.storm_s, plan.seed, storm_requests)
            )
            # Those who come behind it find the places that the storm still has.
            await phase(AFTER, run_steady(AFTER, users, plan.places, plan.normal_s))
        storm.take_in()
    return OverloadRun(capacity, phases, watch.samples, ends_s)


async def run_steady(name: str, users: Sequence[Ask], places: int, seconds: float) -> Phase:
    """Let `places` users send one request after the other; who is refused comes again when the hint says."""
    phase = Phase(name, time.perf_counter())
    end = phase.began_s + seconds

    async def use(place: int) -> None:
        number = place
        while time.perf_counter() < end:
            phase.requests.append(await users[place % len(users)](number))
            await asyncio.sleep((phase.requests[-1].hint_ms or 0.0) / 1e3)
            number += places

    await asyncio.gather(*(use(place) for place in range(places)))
    phase.ended_s = time.perf_counter()
    return phase


async def run_storm(
    users: Sequence[Ask], a_second: float, seconds: float, seed: int, group: asyncio.TaskGroup
) -> Phase:
    """Send requests at random, `a_second` of them whatever becomes of them, over each protocol in turn.

    `group` has the tasks that wait for their ends.
    """
    source = random.Random(seed)  # noqa: S311 - no secret
    phase = Phase(STORM, time.perf_counter())
    due = phase.began_s
    while (due := due + source.expovariate(a_second)) < phase.began_s + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        number = len(phase.tasks)
        phase.tasks.append(group.create_task(users[number % len(users)](number)))
    phase.ended_s = time.perf_counter()
    return phase


@asynccontextmanager
async def _users(services: SupervisedServices, plan: OverloadPlan) -> AsyncIterator[Sequence[Ask]]:
    """Yield users of both protocols, once the texts that they should get are known."""
    async with AsyncClient(services.address) as client:
        requests = [request(text, plan.tokens, OFF) for text in range(TEXTS)]
        texts = [(await client.generate(each)).token_ids for each in requests]

        def of(users: GrpcUsers | HttpUsers) -> Ask:
            async def ask(number: int) -> UserRequest:
                text = number % TEXTS
                return (await users.ask(requests[text])).judge(texts[text])

            return ask

        yield of(GrpcUsers(client)), of(HttpUsers(services.address_of("gateway")))


@asynccontextmanager
async def _resource_watch(services: SupervisedServices) -> AsyncIterator[ResourceWatch]:
    watch = ResourceWatch()
    pids = {label: process.pid for label, process in services.processes.items()}
    sampling = asyncio.create_task(watch.run(pids))
    try:
        yield watch
    finally:
        sampling.cancel()
