"""The services themselves in one process, on a virtual clock: steps take the time of lines, links have a delay."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Generic, TypeVar

from coordinator.pools import LOAD_PERIOD_S
from coordinator.servicer import GenerationServicer
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from draft_service.drafters.catalogue import Catalogue
from draft_service.drafters.model import ModelDrafter
from draft_service.servicer import DraftServicer
from paceline.access.gate import Gate
from paceline.costs.cost_meter import MeterPair
from paceline.drafting.draft_pool import DraftPeer, DraftPool
from paceline.engine.interface import StepPlan
from paceline.protocol.errors import require
from paceline.protocol.handshake import Hello
from paceline.rpc.peer_pool import Pool
from paceline.rpc.servicer import SessionServicer
from paceline.runtime.config import CoordinatorConfig, EngineSettings, TargetConfig
from paceline_lab.simulate.disturbances import UNDISTURBED, Disturbance
from paceline_lab.simulate.lanes import (
    ChannelEnd,
    LaneCall,
    LaneDraftLink,
    LaneTargetLink,
    Processor,
    TimedLane,
)
from paceline_lab.simulate.policies import Policy
from paceline_lab.simulate.script import VOCABULARY, NumberTokenizer, ScriptedEngine, Scripts
from paceline_lab.simulate.specs import CellLayout, Delay, DraftSpec, TargetSpec, is_slowed_beside
from paceline_lab.simulate.virtual_time import TimedExecutor, VirtualLoop
from target_service.servicer import TargetServicer

RETRY_MS = 500.0
"""A client's pause behind a refusal: what coordinators and targets say to it."""
LINK_S = 60.0
"""Within this time every link is up, whatever its delay."""
LONGEST_TEXT = 1 << 20
"""The context of simulated models, in tokens."""
UNBOUNDED_ROWS = 1 << 40
"""KV rows of a service without a bound."""
Spec = TypeVar("Spec", TargetSpec, DraftSpec)


class SimulatedService(ABC, Generic[Spec]):
    """A target or a draft service. It may end, and be there again, empty.

    Args:
        lie: the line that it states at its start is so many times the true one.

    Attributes:
        steps, rows: computed.
        factor: its steps take so many times as long as by its line.
        lost_sessions: that it had when it failed.
    """

    servicer: SessionServicer[Any]
    engine: ScriptedEngine
    _spec: Spec

    def __init__(self, name: str, spec: Spec, delay: Delay, scripts: Scripts, loop: VirtualLoop, lie: float) -> None:
        self.name, self.delay = name, delay
        self.executor = TimedExecutor(loop)
        self.processor = Processor(loop)
        self.steps = self.rows = self.lost_sessions = 0
        self.factor = 1.0
        self.is_up = False
        self._spec, self._lie = spec, lie
        self._scripts, self._loop = scripts, loop
        self._calls: list[LaneCall] = []
        self._ended_s = self._owed_s = 0.0

    def start(self) -> None:
        """Begin to serve."""
        self.servicer, self.is_up = self._make(), True

    def fail(self, notice_s: float) -> None:
        """End at once; those who are linked to it know `notice_s` later."""
        self.lost_sessions += self.load
        self.is_up = False
        self.executor.close()
        self._loop.create_task(self.servicer.close())
        calls, self._calls = self._calls, []
        for call in calls:
            self._loop.call_later(notice_s, partial(call.end, keep_up=False, keep_down=False))

    def open_call(self, up: Callable[..., TimedLane], down: Callable[..., TimedLane]) -> LaneCall:
        """Open a link; one to a service that is down ends at once."""
        call = LaneCall(self.servicer.serve_link if self.is_up else _refuse, self._loop, up, down)
        self._calls = [each for each in self._calls if not each.is_over]
        self._calls.append(call)
        return call

    def owe(self, seconds: float) -> None:
        """Have messages taken so much of the time of the thread that runs steps: the next one is longer by it."""
        self._owed_s += seconds

    @property
    def load(self) -> int:
        """Sessions, those that wait included."""
        return self.servicer.scheduler.sessions if self.is_up else 0

    @abstractmethod
    def _make(self) -> SessionServicer[Any]:
        """Make the service, without sessions."""

    @abstractmethod
    def _pass_time(self, plan: StepPlan) -> None:
        """Take a step's time."""

    def _make_engine(self, settings: EngineSettings, kv_rows: int) -> ScriptedEngine:
        self.engine = ScriptedEngine(
            self._scripts, settings, self._pass_time, max_length=LONGEST_TEXT, kv_rows=kv_rows or UNBOUNDED_ROWS
        )
        return self.engine

    def _take(self, plan: StepPlan) -> None:
        """Take the time of a line, of the context behind the rows, and of the gap behind a step right before."""
        ms, beside_ms = (line.ms(plan.rows) for line in (self._spec.alone, self._spec.beside))
        slow_pace = ms / beside_ms if beside_ms else 1.0
        if self._spec.context_ms:
            ms += self._spec.context_ms * sum(item.base_length for item in plan.items) / 1e3
        ms *= self.factor
        if self._loop.time() == self._ended_s:
            ms += self._spec.gap_ms
        self.steps, self.rows = self.steps + 1, self.rows + plan.rows
        owed_s, self._owed_s = self._owed_s, 0.0
        self.executor.take(ms / 1e3 + owed_s, slow_pace)
        self._ended_s = self._loop.time()


class SimulatedTarget(SimulatedService[TargetSpec]):
    """A target.

    Attributes:
        kv_ms: the sum of its reserved share of KV rows over milliseconds.
        most_waiting: sessions at once that waited for room.
    """

    kv_ms = 0.0
    most_waiting = 0
    _seen_s = 0.0

    def _make(self) -> TargetServicer:
        spec, self._seen_s = self._spec, self._loop.time()
        settings = EngineSettings().model_copy(
            update={
                "max_num_seqs": spec.max_sessions,
                "prefill_chunk": spec.prefill_chunk,
                "max_step_rows": spec.max_step_rows or UNBOUNDED_ROWS,
                "max_sessions_per_link": UNBOUNDED_ROWS,
                "prefix_reuse": spec.prefix_cache,
            }
        )
        config = TargetConfig().model_copy(update={"engine": settings, "max_queue": spec.max_queue})
        engine = self._make_engine(settings, spec.kv_rows)
        return TargetServicer(engine, self.executor, config, line=spec.alone.scale(self._lie))

    def _pass_time(self, plan: StepPlan) -> None:
        spec = self._spec
        self.most_waiting = max(self.most_waiting, self.servicer.scheduler.waiting)
        share = self.engine.kv_rows / (spec.kv_rows or UNBOUNDED_ROWS)
        self.kv_ms += share * 1e3 * (self._loop.time() - self._seen_s)
        self._seen_s = self._loop.time()
        self._take(plan)


class SimulatedDraft(SimulatedService[DraftSpec]):
    """A draft service."""

    def _make(self) -> DraftServicer:
        settings = EngineSettings().model_copy(
            update={"max_num_seqs": 1 << 16, "max_sessions_per_link": UNBOUNDED_ROWS, "prefix_reuse": False}
        )
        engine = self._make_engine(settings, 0)
        meters = MeterPair(self._spec.alone.scale(self._lie))
        drafter = ModelDrafter(engine, self._spec.prefill_chunk, meters=meters)
        return DraftServicer(Catalogue({drafter.manifest.name: drafter}, (engine,)), self.executor, settings)

    def _pass_time(self, plan: StepPlan) -> None:
        self._take(plan)


AnyService = SimulatedTarget | SimulatedDraft


class SimulatedCoordinator:
    """A coordinator with links of its own to all services that run.

    Attributes:
        processor: on which its messages are dealt with, one after the other.
        running: its requests at work.
        lost_sessions: requests that it had when it failed.
    """

    def __init__(self, cell: SimulatedCell, policy: Policy) -> None:
        layout = cell.layout
        self.policy, self.processor = policy, Processor(cell.loop)
        self.running = set[asyncio.Task[None]]()
        self.is_up, self.lost_sessions = True, 0
        self._cell = cell
        self._hello = Hello("simulated")
        fan_out = layout.fan_out if policy.tokens is None else policy.fan_out
        config = CoordinatorConfig(fan_out=fan_out, lease=layout.lease, max_prefetched=layout.max_prefetched)
        config = config.model_copy(update={"max_concurrent_requests": layout.max_requests})
        self._targets = TargetPool(
            round_timeout_s=config.round_timeout_ms / 1e3, wait_s=config.target_wait_ms / 1e3, vocab_size=VOCABULARY
        )
        self._drafts = DraftPool(timeout_s=config.draft_timeout_ms / 1e3, vocab_size=VOCABULARY)
        drafts = self._drafts if cell.drafts else None
        self.servicer = GenerationServicer(config, NumberTokenizer(), self._targets, drafts, Gate())

    async def link_to(self, service: AnyService) -> None:
        """Open a link to a service, which gets sessions from now on."""
        if isinstance(service, SimulatedTarget):
            target = TargetPeer(LaneTargetLink(service.name, self._hello, self._connect))
            self._targets.add(target)
            await target.link.start()
        else:
            draft = DraftPeer(LaneDraftLink(service.name, self._hello, self._connect))
            self._drafts.add(draft)
            await draft.link.start()

    async def wait_up(self) -> None:
        """Wait for the links that were opened."""
        pools: tuple[Pool[Any], ...] = (self._targets, self._drafts)
        for pool in pools:
            for peer in pool.peers:
                await peer.link.wait_up(LINK_S)

    def take_loads(self) -> None:
        """Hear of the other coordinators' sessions."""
        pools: tuple[Pool[Any], ...] = (self._targets, self._drafts)
        for peer in (peer for pool in pools for peer in pool.peers):
            peer.foreign_sessions = max(0, self._cell.service(peer.link.address).load - peer.sessions)

    def leave(self, service: AnyService) -> None:
        """Give a target no more sessions."""
        for peer in self._targets.peers:
            if peer.link.address == service.name:
                self._targets.remove(peer)

    async def serve(self, message: Any, client: Any) -> None:
        """Serve a request.

        Raises:
            CancelledError: the coordinator has failed.
        """
        task = asyncio.ensure_future(self.servicer.Generate(message, client))
        self.running.add(task)
        try:
            await task
        finally:
            self.running.discard(task)

    def fail(self) -> None:
        """Its requests end without an answer."""
        self.lost_sessions += len(self.running)
        self.is_up = False
        for task in [*self.running]:
            task.cancel()

    def _connect(self, address: str) -> ChannelEnd:
        return ChannelEnd(partial(self._open_call, self._cell.service(address)))

    def _open_call(self, service: AnyService) -> LaneCall:
        cell = self._cell
        delay_s = partial(cell.delay_s, service.delay)
        up = partial(TimedLane, cell.loop, delay_s, service.processor, _free)
        down = partial(TimedLane, cell.loop, delay_s, self.processor, partial(self._frame_s, service))
        return service.open_call(up, down)

    def _frame_s(self, service: AnyService, frame: Any) -> float:
        """What the verdicts and proposals of a frame cost this process; proposals cost their maker as much."""
        kinds = Counter(message.WhichOneof("event") for message in frame.events)
        proposals_s = kinds["proposal"] * self._cell.layout.proposal_ms / 1e3
        service.owe(proposals_s)
        return kinds["verdict"] * self._cell.layout.coordinator_ms / 1e3 + proposals_s


class SimulatedCell:
    """Everything that runs; made on its loop.

    Args:
        policies: of the coordinators, in turn.
    """

    def __init__(
        self,
        layout: CellLayout,
        policies: Sequence[Policy],
        scripts: Scripts,
        disturbance: Disturbance = UNDISTURBED,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "it runs on virtual time"
        self.loop, self.layout, self.scripts = loop, layout, scripts
        self._random = Random(layout.seed)  # noqa: S311 - delays are no secret
        self.targets = [
            SimulatedTarget(f"target-{number}", spec, delay, scripts, loop, disturbance.target_lie)
            for number, (spec, delay) in enumerate(layout.targets)
        ]
        self.drafts = [
            SimulatedDraft(f"draft-{number}", spec, delay, scripts, loop, disturbance.draft_lie)
            for number, (spec, delay) in enumerate(layout.drafts)
        ]
        if self.drafts and is_slowed_beside(layout.targets[0][0]):
            self.targets[0].executor.beside(self.drafts[0].executor)
        if self.drafts and is_slowed_beside(layout.drafts[0][0]):
            self.drafts[0].executor.beside(self.targets[0].executor)
        services: list[AnyService] = [*self.targets, *self.drafts]
        self._services = {each.name: each for each in services}
        self.coordinators = [
            SimulatedCoordinator(self, policies[number % len(policies)]) for number in range(layout.coordinators)
        ]
        self._disturbance = disturbance
        self._begun_s = loop.time()

    @property
    def now_ms(self) -> float:
        """Milliseconds since it began to serve."""
        return 1e3 * (self.loop.time() - self._begun_s)

    async def start(self) -> None:
        """Start the services, link the coordinators to them, and have happen what is to."""
        running: list[AnyService] = [*self.targets[: len(self.targets) - self.layout.idle_targets], *self.drafts]
        for service in running:
            await self.start_service(service)
        for coordinator in self.coordinators:
            await coordinator.wait_up()
        self._begun_s = self.loop.time()
        self._disturb(self._disturbance)
        if len(self.coordinators) > 1:
            self._tell_loads()

    async def start_service(self, service: AnyService) -> None:
        """Start a service that no coordinator has known so far."""
        service.start()
        for coordinator in self.coordinators:
            await coordinator.link_to(service)

    def service(self, name: str) -> AnyService:
        """The service of a name, which is its address."""
        return self._services[name]

    def delay_s(self, delay: Delay) -> float:
        """Draw the delay of a message."""
        return delay.draw_ms(self._random) / 1e3

    async def find_home(self) -> SimulatedCoordinator:
        """Wait for a coordinator that runs, as clients do: the one with the fewest requests."""
        up = [each for each in self.coordinators if each.is_up]
        if not up:
            await asyncio.sleep(RETRY_MS / 1e3)
            return await self.find_home()
        return min(up, key=lambda each: len(each.running))

    def _tell_loads(self) -> None:
        for coordinator in self.coordinators:
            coordinator.take_loads()
        self.loop.call_later(LOAD_PERIOD_S, self._tell_loads)

    def _disturb(self, disturbance: Disturbance) -> None:
        for change in disturbance.changes:
            services: Sequence[AnyService] = self.targets if change.service == "target" else self.drafts
            for service in services:
                self.loop.call_later(change.at_ms / 1e3, setattr, service, "factor", change.factor)
        for failure in disturbance.failures:
            at_s, again_s = failure.at_ms / 1e3, (failure.at_ms + failure.down_ms) / 1e3
            failing: dict[str, Sequence[Any]] = {
                "target": self.targets, "draft": self.drafts, "coordinator": self.coordinators,
            }  # fmt: skip
            found = failing[failure.service]
            require(failure.index < len(found), "index", failure.index, f"below {len(found)} {failure.service}s")
            each = found[failure.index]
            if isinstance(each, SimulatedCoordinator):
                self.loop.call_later(at_s, each.fail)
                self.loop.call_later(again_s, setattr, each, "is_up", True)
            else:
                self.loop.call_later(at_s, each.fail, disturbance.notice_ms / 1e3)
                self.loop.call_later(again_s, each.start)


async def _refuse(context: Any) -> None:
    """End a link at once."""


def _free(frame: Any) -> float:
    """Cost nothing."""
    return 0.0
