"""A grammar worker as its service sees it: what it was asked, until when it may take, and how it ended. Pure."""

from __future__ import annotations

import signal
import socket
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.grammars.wire import Frame, FrameReader, encode_frame
from paceline.grammars.worker import OUT_OF_MEMORY
from paceline.protocol.errors import InvalidInput, PacelineError, PeerUnavailable, UnknownSession
from paceline.protocol.sampling import Grammar
from paceline.runtime.config import GrammarSettings
from paceline.runtime.process import describe_exit

WORKER_BYTES = 4 << 20
"""What a worker takes beside what its answers count: pages that it no longer shares with the host (measured)."""

MOST_IN_FLIGHT = 64
STALLED_SHARE = 0.05
"""Of its time: a worker that computed for less did not take it; the machine, or who stopped it, did."""


@dataclass(eq=False)
class Request:
    """Something that a worker is asked, and where its answer goes.

    Attributes:
        session: that it is for; 0: the compilation, which all its sessions wait for.
    """

    session: int
    header: dict[str, Any]
    answer: Future[Frame] = field(default_factory=Future)


@dataclass(eq=False)
class WorkerHandle:
    """One grammar's worker.

    Attributes:
        connection: None until it is forked, and once it has ended.
        compiled: done when it has compiled, or failed to.
        is_compiled: the same, known before those who wait are told.
        sessions: that follow its grammar here.
        left: sessions that have ended and that it was not told of yet.
        in_flight: requests that it was sent, or is being sent. It works on the first of them, until `deadline` at
            most. Several are sent ahead, since a process that has to be woken for each takes twice as long.
        waiting: requests behind them.
        taken_bytes: of memory.
        computed_s: by its last answer.
        is_overdue: whether it took too long and is being killed; until `deadline` its host may say how it ended.
        forked, used: when it was forked and when it answered last, on the monotonic clock.
    """

    id: int
    grammar: Grammar
    settings: GrammarSettings
    connection: socket.socket | None = None
    compiled: Future[Frame] = field(default_factory=Future)
    is_compiled: bool = False
    sessions: set[int] = field(default_factory=set)
    left: list[int] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    in_flight: deque[Request] = field(default_factory=deque)
    forked: float = 0.0
    deadline: float = 0.0
    taken_bytes: int = WORKER_BYTES
    computed_s: float = 0.0
    is_overdue: bool = False
    used: float = 0.0
    unsent: bytes = b""
    frames: FrameReader = field(default_factory=FrameReader)

    @property
    def is_compiling(self) -> bool:
        """Whether it was forked and has not compiled yet."""
        return self.connection is not None and not self.is_compiled

    @property
    def is_idle(self) -> bool:
        """Whether it has compiled and nobody waits for it."""
        return self.is_compiled and self.current is None

    def leave(self, session: int) -> None:
        """A session has ended: nothing that it asked for is begun any more."""
        self.sessions.discard(session)
        self.left.append(session)
        self.waiting = deque(request for request in self.waiting if request.session != session)

    @property
    def current(self) -> Request | None:
        """What it works on."""
        return self.in_flight[0] if self.in_flight else None

    def begin(self) -> None:
        """Give it what waits, as far as there is room for it on the way."""
        while self.connection is not None and self.waiting and len(self.in_flight) < MOST_IN_FLIGHT:
            request = self.waiting.popleft()
            header = {**request.header, "seconds": self._limit_ms(request) / 1e3}
            if self.left:
                header["left"], self.left = self.left, []
            self.unsent += encode_frame(header)
            self.in_flight.append(request)
            if request is self.current:
                self._start_clock()

    def _limit_ms(self, request: Request) -> int:
        return self.settings.step_ms if request.session else self.settings.compile_ms

    def _start_clock(self) -> None:
        if self.current is not None:
            self.deadline = time.monotonic() + self._limit_ms(self.current) / 1e3

    def send(self) -> None:
        """Send what it can take now."""
        if self.unsent and self.connection is not None:
            with suppress(OSError):
                self.unsent = self.unsent[self.connection.send(self.unsent) :]

    def answered(self, frame: Frame) -> Request:
        """The request that a frame answers."""
        self.taken_bytes, self.computed_s = WORKER_BYTES + int(frame[0]["bytes"]), float(frame[0]["computed_s"])
        done = self.in_flight.popleft()
        if not self.is_overdue:
            self._start_clock()
        self.used = time.monotonic()
        return done

    def overdue(self) -> InvalidInput:
        """The error for a request that takes too long."""
        name, limit_ms = self._limit
        doing = "whose next tokens are found" if name == "step_ms" else "that is compiled"
        return self._beyond(f"{doing} within {limit_ms} ms (grammar.{name})")

    @property
    def _limit(self) -> tuple[str, int]:
        """Of what it works on."""
        if self.current is not None and self.current.session:
            return "step_ms", self.settings.step_ms
        return "compile_ms", self.settings.compile_ms

    def stalled(self) -> PeerUnavailable:
        """The error for a request of a worker that was not run."""
        name, limit_ms = self._limit
        why = f"was not run for {limit_ms} ms (grammar.{name}); try again"
        return PeerUnavailable(
            f"{self.grammar.kind.value}: its grammar worker {why}", metadata={"peer": "grammar worker"}
        )

    def ending(self, code: int, computed_s: float) -> PacelineError:
        """Why it ended: the error of what it worked on."""
        if code == -signal.SIGKILL and self.is_overdue:
            ran = computed_s - self.computed_s >= STALLED_SHARE * self._limit[1] / 1e3
            return self.overdue() if ran else self.stalled()
        if code == -signal.SIGXCPU:
            return self.overdue()
        if code in (-signal.SIGABRT, OUT_OF_MEMORY):
            return self._beyond(f"that needs at most {self.settings.memory_bytes} bytes (grammar.memory_bytes)")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return self._beyond("that the library can follow: this one overflowed its stack")
        return self.lost(code)

    def lost(self, code: int | None = None) -> UnknownSession:
        """The error of sessions whose worker ended for no fault of theirs: they can be opened anew."""
        return UnknownSession(f"{self.grammar.kind.value}: its grammar worker has ended ({describe_exit(code)})")

    def _beyond(self, limit: str) -> InvalidInput:
        return InvalidInput.of(self.grammar.kind.value, self.grammar.text, f"a grammar {limit}")
