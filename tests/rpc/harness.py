"""A table-free service for link tests: it records what reaches it and answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from paceline.costs.service_costs import TargetCosts
from paceline.protocol import codec
from paceline.protocol.errors import PacelineError
from paceline.protocol.handshake import Fingerprint, Hello, Welcome
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import Close, SessionSpec
from paceline.protocol.target import Round, TargetCommand, TargetEvent, TargetOpen, TargetOpened, Verdict
from paceline.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from paceline.rpc.frames import FrameWriter
from paceline.rpc.link_kinds import TARGET
from paceline.rpc.peer_link import TargetLink
from paceline.rpc.servicer import serve_link
from paceline.rpc.statuses import from_rpc_error
from paceline.runtime.config import PeerSettings
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc

FINGERPRINT = Fingerprint("table", "abc", 64, "f32")
WELCOME = Welcome("server-1", FINGERPRINT, max_length=4096, max_sessions=64)
HELLO = Hello("client-1", Fingerprint(tokenizer="abc", vocab_size=64))
PATIENCE_S = 20.0


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Return once the condition holds; poll at the loop's pace."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110 - conditions of the code under test have no event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def background(coroutine: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """What runs meanwhile, and is cancelled in the end."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def an_open(session_id: int = 1, tokens: int = 3) -> TargetOpen:
    spec = SessionSpec(tuple(range(tokens)), tokens, SamplingParams(), NoiseKey(7), Acceptance.COUPLED)
    return TargetOpen(session_id, spec)


def a_round(session_id: int = 1, base_length: int = 2) -> Round:
    return Round(session_id, base_length, -1, (5,), Proposal(1, (1, 2), (1.0, 1.0)))


def a_verdict(session_id: int = 1, base_length: int = 2) -> Verdict:
    return Verdict(session_id, base_length, (1, 2, 3))


@dataclass
class Handler:
    """Records commands; answers opens and rounds; fails on request."""

    writer: FrameWriter[TargetEvent]
    commands: list[TargetCommand] = field(default_factory=list)
    closed_count: int = 0
    errors: dict[int, Exception] = field(default_factory=dict)

    def on_command(self, command: TargetCommand) -> None:
        self.commands.append(command)
        error = self.errors.get(command.session_id)
        if error is not None and not isinstance(command, Close):
            raise error
        if isinstance(command, TargetOpen):
            self.writer.send(TargetOpened(command.session_id))
        elif isinstance(command, Round):
            self.writer.send(a_verdict(command.session_id, command.base_length), urgent=True)

    def on_closed(self) -> None:
        self.closed_count += 1


class Servicer(pb_grpc.TargetServiceServicer):
    """One handler for each link."""

    def __init__(self, welcome: Welcome = WELCOME, costs: TargetCosts | None = None) -> None:
        self.welcome = welcome
        self.costs = costs
        """None: it is one that knows of none."""
        self.errors: dict[int, Exception] = {}
        self.handlers: list[Handler] = []
        self.ended = 0

    async def Verify(self, request_iterator: Any, context: Any) -> None:
        try:
            costs = None if self.costs is None else lambda: self.costs or TargetCosts()
            await serve_link(TARGET, context, self.welcome, self._open, costs)
        finally:
            self.ended += 1

    def _open(self, writer: FrameWriter[TargetEvent]) -> Handler:
        self.handlers.append(Handler(writer, errors=self.errors))
        return self.handlers[-1]


class ScriptedServicer(pb_grpc.TargetServiceServicer):
    """Says what its script says, link by link, and then nothing more; the script has the link's number."""

    def __init__(self, script: Callable[[int, Any], Awaitable[None]]) -> None:
        self.links = 0
        self._script = script

    async def Verify(self, request_iterator: Any, context: Any) -> None:
        self.links += 1
        await context.read()
        await self._script(self.links, context)
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(
    servicer: Any, port: int = 0, add: Callable[..., None] = pb_grpc.add_TargetServiceServicer_to_server
) -> AsyncIterator[int]:
    """The servicer on a loopback port."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
    )
    add(servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@asynccontextmanager
async def silent_listener() -> AsyncIterator[int]:
    """A port that takes connections and never says anything."""
    over = asyncio.Event()

    async def swallow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    listener = await asyncio.start_server(swallow, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        over.set()
        listener.close()
        await listener.wait_closed()


class Client:
    """A target link and what its callbacks were told."""

    def __init__(self, port: int, hello: Hello = HELLO, **options: Any) -> None:
        self.link = TargetLink(PeerSettings(address=f"127.0.0.1:{port}"), hello, **options)
        self.ups: list[Welcome] = []
        self.downs: list[PacelineError] = []
        self.events: list[TargetEvent] = []
        self.link.on_change = self._changed
        self.link.on_down = self.downs.append
        self.link.on_event = self.events.append

    async def is_served(self) -> None:
        """A session can be opened."""
        session, before = self.link.next_session_id(), len(self.events)
        self.send(an_open(session))
        await until(lambda: self.events[before:] == [TargetOpened(session)])

    @property
    def frames_sent(self) -> int:
        """Frames written on the standing link."""
        assert self.link._writer is not None
        return self.link._writer.frames_sent

    def send(self, *commands: TargetCommand, urgent: bool = False) -> None:
        for command in commands:
            self.link.send(command, urgent=urgent)

    def _changed(self) -> None:
        if self.link.is_up and self.link.welcome is not None:
            self.ups.append(self.link.welcome)

    async def __aenter__(self) -> Client:
        await self.link.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.link.close()


@asynccontextmanager
async def raw_stream(port: int) -> AsyncIterator[Any]:
    """A stream that says whatever a test wants."""
    channel = open_channel(PeerSettings(address=f"127.0.0.1:{port}"))
    try:
        stub: Any = pb_grpc.TargetServiceStub(channel)
        yield stub.Verify()
    finally:
        await channel.close()


@asynccontextmanager
async def welcomed_stream(port: int) -> AsyncIterator[Any]:
    """One whose hello was answered."""
    async with raw_stream(port) as stream:
        await stream.write(hello_frame())
        assert (await stream.read()).HasField("welcome")
        yield stream


async def error_of(call: Awaitable[Any]) -> PacelineError:
    """What a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def end_of(stream: Any) -> None:
    """Read to the end of a stream."""
    while await stream.read() is not grpc.aio.EOF:
        pass


def hello_frame(hello: Hello = HELLO) -> pb.VerifyRequest:
    return pb.VerifyRequest(hello=codec.encode_hello(hello))


def welcome_frame(**fields: Any) -> pb.VerifyResponse:
    return pb.VerifyResponse(welcome=codec.encode_welcome(WELCOME), **fields)
