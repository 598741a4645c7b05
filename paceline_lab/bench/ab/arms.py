"""Arms of a comparison: how services are started, how requests are sent to them, and what a run of them measured."""

from __future__ import annotations

import asyncio
import statistics
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from paceline.client import AsyncClient
from paceline.local.service_process import ServiceProcess
from paceline.local.settings import local_settings
from paceline.local.supervisor import SupervisedServices
from paceline.models.table_names import TableSpec, is_table
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO
from paceline.runtime.config import NOT_QUANTIZED
from paceline_lab.bench.simulated_pair import share_of_ideal
from paceline_lab.bench.users import GrpcUsers, HttpUsers, RequestOutcome, UserRequest
from paceline_lab.reporting.figures import percentile

PRIMING_TOKENS = 2


@dataclass(frozen=True)
class ArmServices:
    """How services are started; arms with the same label share services.

    `coordinator` has settings of the coordinator alone; `environment` has variables of all services, beside ours.
    `cores` and `quantization` are as `paceline serve` takes them; empty: its own. With `urls`, addresses
    of coordinators that are running, nothing is started, and requests go to each in turn, with `api_key`.
    """

    model: str
    drafter: str = AUTO
    label: str = "services"
    coordinator: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    opens_http: bool = False
    cores: str = ""
    quantization: str = ""
    urls: Sequence[str] = ()
    api_key: str | None = field(default=None, repr=False)

    @asynccontextmanager
    async def running(self, folder: Path) -> AsyncIterator[RunningServices]:
        """Run the services while the context is open."""
        if self.urls:
            async with AsyncExitStack() as stack:
                yield RunningServices({}, GrpcUsers(*[await self._reach(url, stack) for url in self.urls]), None)
            return
        options: dict[str, Any] = {"environment": self.environment, "coordinator": self.coordinator}
        settings = local_settings(self.model, self.drafter, self.quantization or NOT_QUANTIZED, self.cores or None)
        with SupervisedServices(settings, folder, opens_http=self.opens_http, **options) as services:
            async with AsyncClient(services.address) as client:
                http = HttpUsers(services.address_of("gateway")) if self.opens_http else None
                step_ms = TableSpec.parse(self.model).step_ms if is_table(self.model) else 0.0
                yield RunningServices(services.processes, GrpcUsers(client), http, step_ms)

    async def _reach(self, url: str, stack: AsyncExitStack) -> AsyncClient:
        client = await stack.enter_async_context(AsyncClient(url, api_key=self.api_key))
        await client.describe_models()  # fails at once if nobody listens; a generation would wait
        return client


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        speculation: settings of its requests; None: as the case has them.
        predicts: whether its requests keep the case's predicted output.
        starts_anew: services start for each of its runs, whose requests are their first.
    """

    name: str
    services: ArmServices
    speculation: SpeculationSettings | None = None
    over_http: bool = False
    predicts: bool = True
    starts_anew: bool = False

    def request(self, request: GenerateRequest) -> GenerateRequest:
        """Return a case's request as this arm sends it."""
        prediction_text = request.prediction_text if self.predicts else ""
        return replace(request, speculation=self.speculation or request.speculation, prediction_text=prediction_text)


@dataclass(frozen=True)
class Case:
    """Requests that all arms are sent: those of a turn run at once, and the turns repeat.

    `starts_s`: when each of a turn's requests is sent, seconds; empty: all at once.
    """

    name: str
    turns: Sequence[Sequence[GenerateRequest]]
    starts_s: Sequence[float] = ()


@dataclass(frozen=True)
class Stage:
    """Arms that are up together, and their cases. The others are compared with the first arm.

    `apart`: the first arm's second run has services of its own, as every arm has: services, too, differ by chance.
    """

    name: str
    arms: Sequence[Arm]
    cases: Sequence[Case]
    apart: bool = False

    @property
    def all_arms(self) -> tuple[Arm, ...]:
        """Return the arms, with the first one a second time: its ratio to itself is the run's noise."""
        first, *others = self.arms
        services = replace(first.services, label="again") if self.apart else first.services
        return first, *others, replace(first, name=f"{first.name} again", services=services)

    def against(self, tree: Path) -> Stage:
        """Return a stage of the last arm beside the same arm of another checkout."""
        mine = replace(self.arms[-1], name="this tree")
        paths = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}  # or the current folder would come before it
        environment = {**mine.services.environment, **paths}
        services = replace(mine.services, label="other tree", environment=environment)
        return replace(self, arms=(replace(mine, name="other tree", services=services), mine), apart=True)


@dataclass(frozen=True)
class ArmRun:
    """Figures of requests that ran at once.

    Attributes:
        tokens_per_second: all tokens over the time from the first request to the last token.
        slowest_per_second: the slowest request's tokens a second, behind its first message.
        figures: other figures by their names.
        cpu_us: CPU time of each process for a token.
        text: a checksum of all texts.
    """

    tokens_per_second: float
    slowest_per_second: float
    figures: Mapping[str, float]
    cpu_us: Mapping[str, float]
    text: int

    @classmethod
    def of(
        cls, answers: Sequence[UserRequest], seconds: float, cpu_s: Mapping[str, float], step_ms: float = 0.0
    ) -> ArmRun:
        """Fold answers that came to their ends.

        `step_ms`: how long a step of a simulated target waits; a request by itself has a share of the ideal then.
        """
        texts = [each.token_ids for each in answers]
        tokens = sum(map(len, texts))
        gaps = [gap for each in answers for gap in each.gaps_ms]
        slowest_ms = max(each.token_ms for each in answers)
        rounds = sum(each.stats.rounds for each in answers)
        is_alone = step_ms > 0 and len(answers) == 1 and rounds > 1
        figures = {
            "first token ms": statistics.median(each.first_ms for each in answers),
            "between messages ms p50": percentile(gaps, 50),
            "p99": percentile(gaps, 99),
            "tokens a round": tokens / rounds if rounds else 0.0,
            "rounds that drafted": sum(each.stats.num_spec_steps for each in answers) / rounds if rounds else 0.0,
            "of the ideal": share_of_ideal(answers[0].stats, step_ms) if is_alone else 0.0,
        }
        cpu_us = {label: 1e6 * process_s / tokens for label, process_s in cpu_s.items()}
        text = zlib.crc32(repr(texts).encode())
        return cls(tokens / seconds, 1e3 / slowest_ms if slowest_ms else 0.0, figures, cpu_us, text)


@dataclass(frozen=True)
class RunningServices:
    """Services that run, and their users.

    `processes` are those of this machine; `step_ms`: how long a step of a simulated target waits, else 0.
    """

    processes: Mapping[str, ServiceProcess]
    grpc: GrpcUsers
    http: HttpUsers | None
    step_ms: float = 0.0

    async def run(self, arm: Arm, requests: Sequence[GenerateRequest], starts_s: Sequence[float] = ()) -> ArmRun:
        """Send an arm's requests, behind short ones that bring prompts of real models into the caches.

        Raises:
            PacelineError: a request was not served.
        """
        users = self.http if arm.over_http else self.grpc
        assert users is not None, "an arm over HTTP has services that open it"
        requests = [arm.request(request) for request in requests]
        if requests[0].messages and not arm.starts_anew:
            await asyncio.gather(*(users.ask(replace(each, max_new_tokens=PRIMING_TOKENS)) for each in requests))
        await users.connect(len(requests))
        before, began = self._cpu_s(), time.perf_counter()
        starts = starts_s or [0.0] * len(requests)
        answers = await asyncio.gather(*(_ask_at(users, *each) for each in zip(requests, starts, strict=True)))
        seconds, after = time.perf_counter() - began, self._cpu_s()
        for answer in answers:
            if answer.outcome is not RequestOutcome.SERVED:
                raise PacelineError(f"a request of the arm {arm.name!r} was {answer.outcome}: {answer.why}")
        cpu_s = {label: process_s - before[label] for label, process_s in after.items()}
        return ArmRun.of(answers, seconds, cpu_s, self.step_ms)

    def _cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that each process has used so far; this process counts as the clients'."""
        times = {label: psutil.Process(each.pid).cpu_times() for label, each in self.processes.items()}
        return {label: each.user + each.system for label, each in times.items()} | {"clients": time.process_time()}


async def _ask_at(users: GrpcUsers | HttpUsers, request: GenerateRequest, start_s: float) -> UserRequest:
    await asyncio.sleep(start_s)
    return await users.ask(request)


@dataclass(frozen=True)
class ArmsTurn:
    """One case's runs in a turn, by arm."""

    stage: str
    case: str
    number: int
    runs: Mapping[str, ArmRun]
