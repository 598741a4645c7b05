"""In-process services on loopback, and clients that talk to them over real links."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import grpc

from draft_service.drafters.catalogue import Catalogue
from draft_service.drafters.model import ModelDrafter
from draft_service.servicer import DraftServicer
from paceline.engine.executor import Executor
from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.table.engine import TableEngine, TableModel
from paceline.grammars.sessions import Grammars
from paceline.models.table_names import TableSpec
from paceline.protocol.draft import DraftBudget, DraftedProposal, DraftOpen, DraftOpened, Verifying
from paceline.protocol.handshake import Hello
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import Failure, SessionSpec
from paceline.protocol.target import Round, TargetOpen, TargetOpened, Verdict
from paceline.rpc.peer_link import DraftLink, PeerLink, TargetLink
from paceline.rpc.server import run_server
from paceline.runtime.config import EngineSettings, PeerSettings, ServerSettings, TargetConfig
from paceline.v1 import draft_service_pb2_grpc as draft_grpc
from paceline.v1 import target_service_pb2_grpc as target_grpc
from target_service.servicer import TargetServicer

WAIT_S = 10.0
SPEC = TableSpec(vocab=32, seed=3, max_length=256)
LAW = TableModel(SPEC)
NOISE = NoiseKey(seed=11)
SAMPLING = SamplingParams(temperature=0.9)

E = TypeVar("E")
_NOBODY = itertools.count(1 << 20)
_OF_OPEN = {field.name for field in fields(TargetOpen)}


class RecordingEngine(TableEngine):
    """A table engine that notes its plans, can be held between steps, and can be made to fail."""

    def __init__(self, spec: TableSpec = SPEC) -> None:
        super().__init__(spec)
        self.plans: list[StepPlan] = []
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.poison: int | None = None
        """A token id: a step that carries it fails."""

    def step(self, plan: StepPlan) -> Sequence[Logits]:
        self.entered.set()
        assert self.go.wait(WAIT_S), "the test lets the step go on"
        self.plans.append(plan)
        if self.poison is not None and any(self.poison in item.token_ids for item in plan.items):
            raise RuntimeError("poisoned step")
        return super().step(plan)

    async def hold(self, events: Events, *commands: Any) -> None:
        """Send commands; returns in the step that they bring about, which lasts until `go` is set."""
        self.go.clear()
        self.entered.clear()
        events.send(*commands)
        await asyncio.to_thread(self.entered.wait, WAIT_S)


class Events:
    """A link and what came over it; `of` waits for the next event of a kind and session.

    `servicer`: of the service at its other end, if it is one of this process alone.
    """

    def __init__(self, link: PeerLink[Any, Any], servicer: Any = None) -> None:
        self.link = link
        self.servicer = servicer
        self._events: list[Any] = []
        self._news = asyncio.Event()
        link.on_event = self._arrived

    def send(self, *commands: Any, urgent: bool = False) -> None:
        for command in commands:
            self.link.send(command, urgent=urgent)

    async def answer(self, command: Any, kind: type[E], *, urgent: bool = False) -> E:
        """Send a command, and take the next event of a kind for its session."""
        self.send(command, urgent=urgent)
        return await self.of(kind, command.session_id)

    async def open(self, *opens: TargetOpen | DraftOpen) -> None:
        """Open sessions."""
        self.send(*opens)
        for each in opens:
            await self.of(TargetOpened if isinstance(each, TargetOpen) else DraftOpened, each.session_id)

    async def expect_failure(self, command: Any, reason: str, text: str = "", *, closed: bool) -> Failure:
        """Send a command that fails its session so; `text` is in the failure's message."""
        failure = await self.answer(command, Failure)
        assert (failure.reason, failure.session_closed) == (reason, closed)
        assert text in failure.message
        return failure

    async def proposal(self, command: Any) -> Proposal:
        """Send a draft a command, and take the next proposal for its session."""
        return (await self.answer(command, DraftedProposal)).proposal

    async def handled(self, *commands: Any) -> None:
        """Send commands; all that was sent is handled then: a command of no session is refused behind it."""
        self.send(*commands)
        nobody = next(_NOBODY)
        command = Round(nobody, 0, ROOT, (1,)) if isinstance(self.link, TargetLink) else Verifying(nobody, 0)
        assert (await self.answer(command, Failure)).reason == "UNKNOWN_SESSION"

    def another(self) -> AbstractAsyncContextManager[Events]:
        """One more link to the same service."""
        return linked(type(self.link)(PeerSettings(address=self.link.address), Hello("test")), self.servicer)

    async def of(self, kind: type[E], session_id: int) -> E:
        """Take the oldest event of this kind for this session; any other failure of it fails the test."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for event in self._events:
                    if event.session_id == session_id and isinstance(event, kind):
                        self._events.remove(event)
                        return event
                    unexpected = isinstance(event, Failure) and event.session_id == session_id
                    assert not unexpected, event
                self._news.clear()
                await self._news.wait()

    def has(self, kind: type[Any], session_id: int = 0) -> bool:
        """Whether an event of this kind, of this session or any, has come and was not taken."""
        return any(self._is(event, kind, session_id) for event in self._events)

    def take_all(self, kind: type[E], session_id: int = 0) -> list[E]:
        """Take the events of this kind, of this session or any, that have come."""
        events: list[Any] = [each for each in self._events if self._is(each, kind, session_id)]
        self._events = [each for each in self._events if not self._is(each, kind, session_id)]
        return events

    @staticmethod
    def _is(event: Any, kind: type[Any], session_id: int) -> bool:
        return isinstance(event, kind) and session_id in (0, event.session_id)

    def _arrived(self, event: Any) -> None:
        self._events.append(event)
        self._news.set()


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    for _ in range(round(WAIT_S / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within {WAIT_S:g} s: {what}")


@asynccontextmanager
async def serving(register: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    """A server on a free port; yields host:port."""
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def drained() -> None:
        return

    runner = asyncio.create_task(
        run_server(
            ServerSettings(port=0, drain_seconds=1),
            register,
            ["paceline.v1.TargetService", "paceline.v1.DraftService"],
            stop=stop,
            on_drain=drained,
            on_serving=lambda running: address.set_result(f"127.0.0.1:{running.port}"),
        )
    )
    try:
        yield await asyncio.wait_for(asyncio.shield(address), WAIT_S)
    finally:
        stop.set()
        await runner


@asynccontextmanager
async def linked(link: PeerLink[Any, Any], servicer: Any = None) -> AsyncIterator[Events]:
    """A link that stands."""
    events = Events(link, servicer)
    await link.start()
    try:
        await link.wait_up(WAIT_S)
        yield events
    finally:
        await link.close()


def target_link(address: str) -> TargetLink:
    return TargetLink(PeerSettings(address=address), Hello("test"))


def draft_link(address: str) -> DraftLink:
    return DraftLink(PeerSettings(address=address), Hello("test"))


@asynccontextmanager
async def target_service(
    engine: Engine,
    *,
    max_queue: int = 64,
    max_link_share: float = 1.0,
    step_timeout_s: float = 60.0,
    grammars: Grammars | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[TargetServicer, str]]:
    """A target service; yields its servicer and address."""
    executor = Executor("target-test")
    engine_settings = EngineSettings(**({"prefill_chunk": 16, "max_num_seqs": 64} | settings))
    config = TargetConfig(
        engine=engine_settings,
        max_queue=max_queue,
        max_link_share=max_link_share,
        step_timeout_ms=step_timeout_s * 1e3,
    )
    servicer = TargetServicer(engine, executor, config, grammars)
    async with _closing(servicer.close, executor):

        def register(server: grpc.aio.Server) -> None:
            target_grpc.add_TargetServiceServicer_to_server(servicer, server)

        async with serving(register) as address:
            yield servicer, address


@asynccontextmanager
async def draft_service(
    engine: Engine,
    *,
    prefill_chunk: int = 16,
    drafter: ModelDrafter | None = None,
    name: str = "model",
    **settings: Any,
) -> AsyncIterator[tuple[DraftServicer, str]]:
    """A draft service with a model drafter of that name; yields its servicer and address."""
    executor = Executor("draft-test")
    drafters: dict[str, Any] = {name: drafter or ModelDrafter(engine, prefill_chunk)}
    engine_settings = EngineSettings(**({"max_num_seqs": 64} | settings))
    servicer = DraftServicer(Catalogue(drafters, (engine,)), executor, engine_settings)
    async with _closing(servicer.close, executor):

        def register(server: grpc.aio.Server) -> None:
            draft_grpc.add_DraftServiceServicer_to_server(servicer, server)

        async with serving(register) as address:
            yield servicer, address


@asynccontextmanager
async def linked_target(engine: Engine, **settings: Any) -> AsyncIterator[Events]:
    """A link to a target service."""
    async with target_service(engine, **settings) as at, linked(target_link(at[1]), at[0]) as events:
        yield events


@asynccontextmanager
async def linked_draft(engine: Engine, **settings: Any) -> AsyncIterator[Events]:
    """A link to a draft service."""
    async with draft_service(engine, **settings) as at, linked(draft_link(at[1]), at[0]) as events:
        yield events


@asynccontextmanager
async def _closing(close: Callable[[], Awaitable[None]], executor: Executor) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await close()
        executor.close()


def target_open(session_id: int, prefix: Sequence[int], **changes: Any) -> TargetOpen:
    own = {name: changes.pop(name) for name in tuple(changes) if name in _OF_OPEN}
    return TargetOpen(session_id, _spec(prefix, **changes), **own)


def draft_open(session_id: int, prefix: Sequence[int], budget: DraftBudget, **changes: Any) -> DraftOpen:
    drafter, takes_shadows = changes.pop("drafter", ""), changes.pop("takes_shadows", False)
    return DraftOpen(session_id, _spec(prefix, **changes), drafter, budget, takes_shadows)


def _spec(prefix: Sequence[int], **changes: Any) -> SessionSpec:
    spec = SessionSpec(tuple(prefix), len(prefix), SAMPLING, NOISE, Acceptance.COUPLED)
    return replace(spec, **changes)


def first_round(session_id: int, prefix: Sequence[int], proposal: Proposal | None = None) -> Round:
    return Round(session_id, len(prefix) - 1, ROOT, (prefix[-1],), proposal)


def chain(tokens: Sequence[int], proposal_id: int = 1) -> Proposal:
    return Proposal(proposal_id, tuple(tokens), (1.0,) * len(tokens))


async def verdict_of(events: Events, round_: Round) -> Verdict:
    """Send a round and wait for its verdict."""
    return await events.answer(round_, Verdict, urgent=True)
