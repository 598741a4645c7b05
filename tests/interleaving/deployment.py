"""Real services and a real coordinator on one event loop, with lanes between them; each turn one thing happens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, cast
from unittest import mock

from coordinator.servicer import GenerationServicer
from coordinator.sessions.target import TargetSession
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from draft_service.drafters.catalogue import Catalogue
from draft_service.drafters.model import ModelDrafter
from draft_service.servicer import DraftServicer
from paceline.access.gate import Gate
from paceline.drafting.draft_pool import DraftPeer, DraftPool
from paceline.engine.table.engine import TableEngine
from paceline.models.table_names import TableSpec
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol import codec
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.handshake import Hello
from paceline.protocol.sampling import SamplingParams
from paceline.rpc.retries import Backoff, Retries
from paceline.rpc.servicer import SessionServicer
from paceline.runtime import clock
from paceline.runtime.config import CoordinatorConfig, EngineSettings, TargetConfig
from paceline_lab.simulate.lanes import ChannelEnd, LaneDraftLink, LaneTargetLink
from target_service.servicer import TargetServicer
from tests.interleaving.clients import AskedText, ClientEnd
from tests.interleaving.lanes import Heard, ProposedBefore, SteppedCall
from tests.interleaving.policies import any_policy
from tests.interleaving.schedules import ByteOrder, Schedule, Setup
from tests.interleaving.stepping import PausingEngine, SteppedExecutor, SteppedLoop
from tests.services.feature_spy import FeatureSpy

SPEC = TableSpec(vocab=6, seed=3, max_length=128, sharpness=2.0)
PROMPT = (1, 0, 2)
PLAIN = SamplingParams(temperature=0.9)
PENALTIES = replace(PLAIN, repetition_penalty=1.2, frequency_penalty=0.3)
READING = "reading"
"""The drafter that reads the target's features."""
LONGEST_S = 150.0
"""A request that takes longer, on the stepped clock, will never end: no fault lasts, and nothing waits longer."""
FAIR = ByteOrder.of(b"")
"""What became possible first comes first."""
MOST_TURNS = 20_000
SPARE_S = 4.0
"""How much later than timers messages come, in all, without a fault: less than the shortest timeout of a link."""
DRAIN_S = 2.0
"""How long a service refuses sessions, as if it were to end."""
SILENT_S = 11.0
"""How long all stands still at once, as a fault: longer than a target may be silent, or a handshake take."""


class Stuck(AssertionError):
    """Nothing that can happen ends the text."""


@dataclass(frozen=True)
class SteppedService:
    """A target or a draft service with its engine's thread; `serve` serves a link."""

    name: str
    executor: SteppedExecutor
    servicer: SessionServicer[Any]
    serve: Callable[[Any], Any]

    @property
    def kv_rows(self) -> int:
        rows: int = cast(Any, self.servicer).status().kv_rows
        return rows


class SteppedDeployment:
    """Everything that runs, and what may happen next.

    Args:
        setup: what runs.
        schedule: decides what comes next, plans and faults.
    """

    def __init__(self, loop: SteppedLoop, setup: Setup, schedule: Schedule) -> None:
        self.loop = loop
        self.setup = setup
        self.turns = 0
        self.told: Callable[[str], object] | None = None
        """Called with all that happens and arrives."""
        self.moved: list[str] = []
        """All that has happened."""
        self.counts = Counter[str]()
        self.complained: list[str] = []
        self._drawn: ProposedBefore = {}
        self.wires: list[SteppedCall] = []
        self.running: list[AskedText] = []
        self.given_up = ""
        """Of a session that its target lost without a fault: that target and session, by the error."""
        self.watch: Callable[[], None] = lambda: None
        """Called at each turn."""
        self._order = ByteOrder.of(schedule.order)
        self._policy = chain(schedule.policy, repeat(0))
        self._faults = sorted(schedule.faults)[: setup.faults]
        self._seen, self._clock_seen = -1, 0.0
        self._until: Callable[[], bool] = lambda: False
        self._fair = True
        self._spare_s = SPARE_S
        self._reached: asyncio.Future[None] | None = None
        self.executors: list[SteppedExecutor] = []
        self.services: dict[str, SteppedService] = {}
        for number in range(setup.targets):
            self._add_target(f"t{number}")
        for number in range(setup.drafts):
            self._add_draft(f"d{number}")
        self._connect()

    def pick(self, choices: int) -> int:
        """What the schedule's policy chooses."""
        return next(self._policy) % choices

    # What runs.

    def _engine(self, spec: TableSpec) -> tuple[PausingEngine, SteppedExecutor]:
        executor = SteppedExecutor(self.loop)
        self.executors.append(executor)
        return PausingEngine(TableEngine(spec), executor, self.loop), executor

    def _add_target(self, name: str) -> None:
        engine, executor = self._engine(SPEC)
        config = TargetConfig(
            engine=EngineSettings(prefill_chunk=2, max_num_seqs=self.setup.target_rooms, prefix_reuse=False)
        )
        servicer = TargetServicer(engine, executor, config)
        self.services[name] = SteppedService(name, executor, servicer, partial(servicer.Verify, None))

    def _add_draft(self, name: str) -> None:
        engine, executor = self._engine(replace(SPEC, noise=self.setup.noise))
        reader = FeatureSpy(engine)
        reader.manifest = replace(reader.manifest, name=READING)
        drafters: dict[str, Any] = {"model": ModelDrafter(engine, 2), "other": ModelDrafter(engine, 3, "other")}
        if self.setup.drafter == READING:
            drafters = {READING: reader}
        settings = EngineSettings(max_num_seqs=self.setup.draft_rooms, prefix_reuse=False)
        servicer = DraftServicer(Catalogue(drafters, (engine,)), executor, settings)
        self.services[name] = SteppedService(name, executor, servicer, partial(servicer.Draft, None))

    def _connect(self) -> None:
        hello, setup = Hello("interleaving"), self.setup
        names = [*self.services]
        targets = [LaneTargetLink(each, hello, self.channel_to) for each in names if each[0] == "t"]
        drafts = [LaneDraftLink(each, hello, self.channel_to) for each in names if each[0] == "d"]
        self.links: list[Any] = [*targets, *drafts]
        target_pool = TargetPool(map(TargetPeer, targets), round_timeout_s=10, wait_s=60)
        draft_pool = DraftPool(map(DraftPeer, drafts), timeout_s=1, vocab_size=SPEC.vocab)
        self.peers: list[Any] = [*target_pool.peers, *draft_pool.peers]
        config = CoordinatorConfig(
            model="table:vocab=6",
            drafter=setup.drafter,
            fan_out=setup.fan_out,
            lease=setup.lease,
            max_prefetched=setup.max_prefetched,
        )
        tokenizer = TableTokenizer(SPEC.vocab, None)
        self.coordinator = GenerationServicer(config, tokenizer, target_pool, draft_pool if drafts else None, Gate())

    def channel_to(self, address: str) -> ChannelEnd:
        """What the coordinator's links open."""

        def connect() -> SteppedCall:
            service = self.services[address]
            heard = Heard(self.counts, self.complained, self._drawn, self._hear)
            self.wires.append(SteppedCall(service.name, service.serve, self.loop, self.setup.capacity, heard))
            return self.wires[-1]

        return ChannelEnd(connect)

    def ask(self, seed: int) -> None:
        """A client asks for a text."""
        request = GenerateRequest(
            token_ids=PROMPT,
            sampling=PENALTIES if self.setup.penalties else PLAIN,
            seed=seed,
            max_new_tokens=self.setup.tokens,
            acceptance=self.setup.acceptance,
            speculation=SpeculationSettings(num_draft_tokens=self.setup.num_draft_tokens),
        )
        client = ClientEnd()
        generating = self.coordinator.Generate(codec.encode_generate_request(request), cast(Any, client))
        self.running.append(AskedText(seed, client, self.loop.create_task(cast(Any, generating))))

    # What happens.

    async def reach(self, until: Callable[[], bool], *, fair: bool) -> None:
        """Let turns go by until something holds. `fair`: what became possible first comes first, without faults."""
        self._until, self._fair, self._reached = until, fair, self.loop.create_future()
        self._deadline = self.loop.now + LONGEST_S
        self.loop.call_soon(self._turn)
        await self._reached

    def _turn(self) -> None:
        assert self._reached is not None
        try:
            if self._until():
                self._reached.set_result(None)
                return
            self._act()
        except BaseException as error:  # noqa: BLE001 - the run fails, not the loop
            self._reached.set_exception(error)
            return
        self.loop.call_soon(self._turn)
        self._seen = self.loop.calls

    def _act(self) -> None:
        self.turns += 1
        self.watch()
        idle = self.loop.calls == self._seen and self.loop.now == self._clock_seen
        self._clock_seen = self.loop.now
        if self.turns > MOST_TURNS or self.loop.now > self._deadline:
            raise Stuck(f"no end after {self.turns} turns, {self.loop.now - self._deadline + LONGEST_S:g} s")
        if self.given_up:
            raise Stuck(self.given_up)
        if not self._fair and self._fail_what_is_due():
            idle = False  # what it set off comes before more time passes
        moves = self.moves()
        chosen = (FAIR if self._fair else self._order).next([*moves], idle=idle) if moves else None
        if chosen is not None:
            self._note(chosen)
            moves[chosen]()
        elif idle and not self.loop.move_to_next_timer():
            raise Stuck("nothing can happen any more")

    def moves(self) -> dict[str, Callable[[], object]]:
        """What may happen now, what became possible first at first; time may pass before it."""
        self.wires = [wire for wire in self.wires if not wire.is_over or wire.defect]
        lanes = [lane for wire in self.wires for lane in wire.lanes if len(lane)]
        possible = [(each.since, each.name, each.deliver) for each in lanes]
        busy = [(each.name, each.executor) for each in self.services.values() if each.executor.can_step]
        possible += [(executor.since, name, executor.step) for name, executor in busy]
        possible.sort(key=lambda each: each[0])
        found: dict[str, Callable[[], object]] = {}
        for _, name, act in possible:
            found.setdefault(name, act)
        if found and not self._fair and self._spare_s > 0:
            found["time"] = self._pass_time
        return found

    def _pass_time(self) -> None:
        """The next timer fires before what is under way, if that is not for long."""
        ahead = self.loop.next_timer() - self.loop.now
        if ahead <= self._spare_s:
            self._spare_s -= ahead
            self.loop.move_to_next_timer()

    def _note(self, move: str) -> None:
        self.moved.append(move)
        if self.told is not None:
            self.told(f"{self.turns} {self.loop.now:.3f} {move}")

    def _hear(self, kind: str, said: Any) -> None:
        if self.told is not None:
            self.told(f"    {kind} {' '.join(str(said).split())[:200]}")

    def _fail_what_is_due(self) -> bool:
        """Inject the faults of this turn; says whether there were any."""
        injected = False
        while self._faults and self._faults[0][0] <= self.turns:
            which = self._faults.pop(0)[1]
            possible = [*self.faults()]
            fault, act = possible[which % len(possible)]
            self._note(fault)
            act()
            injected = True
        return injected

    def faults(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What may go wrong now."""
        for wire in self.wires:
            yield f"break {wire.to}", partial(wire.end, keep_up=False, keep_down=False)
            yield f"end {wire.to}", partial(wire.end, keep_up=True, keep_down=True)
        for service in self.services.values():
            yield f"drain {service.name}", partial(self._drain, service)
        yield "silence", partial(self.loop.move, SILENT_S)
        for request in self.running:
            yield f"cancel {request.seed}", partial(self._cancel, request)
            yield f"slow reader {request.seed}", partial(self._stop_reading, request)

    def _drain(self, service: SteppedService) -> None:
        """New sessions are refused for a while."""
        if service.servicer.scheduler.draining:
            return
        service.servicer.scheduler.draining = True
        self.loop.call_later(DRAIN_S, setattr, service.servicer.scheduler, "draining", False)

    def lost(self, give_up: Callable[[TargetSession, PacelineError], None]) -> Any:
        """As `give_up`, and a defect, unless a fault took the time."""

        def lost(session: TargetSession, error: PacelineError) -> None:
            if "silence" not in self.moved:
                self.given_up = error.message
            give_up(session, error)

        return lost

    def _cancel(self, request: AskedText) -> None:
        request.cancelled = True
        request.task.cancel()

    def _stop_reading(self, request: AskedText) -> None:
        request.client.reads.clear()
        resumed = self.loop.call_later(0.05, request.client.reads.set)
        request.task.add_done_callback(lambda _: resumed.cancel())

    @property
    def is_answered(self) -> bool:
        """Whether every request has ended."""
        return all(request.task.done() for request in self.running)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way and every link stands."""
        idle = self.loop.calls == self._seen and self.loop.now == self._clock_seen
        drains = any(service.servicer.scheduler.draining for service in self.services.values())
        return idle and not drains and not self.moves() and all(link.is_up for link in self.links)

    async def close(self) -> None:
        """End everything."""
        for request in self.running:
            request.task.cancel()
        for link in self.links:
            await link.close()
        for executor in self.executors:
            executor.close()
        self.coordinator.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@contextmanager
def deployed(setup: Setup, schedule: Schedule) -> Iterator[SteppedDeployment]:
    """A deployment on its loop, whose clock is the only one."""
    loop = SteppedLoop()
    asyncio.set_event_loop(loop)
    with ExitStack() as stack:
        stack.callback(asyncio.set_event_loop, None)
        stack.callback(loop.close)
        stack.enter_context(clock.running_on(loop.time))
        for drawing in (Backoff, Retries):  # the draw is a default of theirs
            longest = (*(drawing.__init__.__defaults__ or ())[:-1], lambda low, high: high)
            stack.enter_context(mock.patch.object(drawing.__init__, "__defaults__", longest))

        async def made() -> SteppedDeployment:
            return SteppedDeployment(loop, setup, schedule)

        deployment = loop.run_until_complete(made())
        lost = deployment.lost(TargetSession._on_unanswered)
        stack.enter_context(mock.patch.object(TargetSession, "_on_unanswered", lost))
        if setup.num_draft_tokens is None:
            stack.enter_context(any_policy(deployment.pick))
        yield deployment
