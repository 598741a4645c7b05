"""A service's view of a grammar worker: its requests, their deadline, and the error that its end means. Pure."""

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
"""Memory of a worker beyond what its answers count: pages that it no longer shares with the host (measured)."""

MOST_IN_FLIGHT = 64
STALLED_SHARE = 0.05
"""Share of its time limit: a worker that used less CPU time was stalled by the machine or by a signal."""


@dataclass(eq=False)
class Request:
    """A request to a worker, with the future of its answer.

    Attributes:
        session: the session that it belongs to; 0: the compilation, which all sessions wait for.
    """

    session: int
    header: dict[str, Any]
    answer: Future[Frame] = field(default_factory=Future)


@dataclass(eq=False)
class WorkerHandle:
    """One grammar's worker.

    Attributes:
        connection: its socket; None until it is forked, and once it has ended.
        compilation: the answer to its compilation.
        is_compiled: whether that answer has arrived; set before the future is settled.
        sessions: open sessions of its grammar.
        ended_sessions: sessions whose end it has not been told yet.
        in_flight: requests that were sent, or are being sent. The worker works on the first one, until `deadline` at
            most. Several are sent ahead, since a process that has to be woken for each takes twice as long.
        waiting: requests that are not sent yet.
        used_bytes: memory, by its last answer.
        computed_s: CPU time, by its last answer.
        is_overdue: whether it took too long and is being killed; its host has until `deadline` to report its end.
        forked_at, used_at: times of its fork and of its last answer, on the monotonic clock.
    """

    id: int
    grammar: Grammar
    settings: GrammarSettings
    connection: socket.socket | None = None
    compilation: Future[Frame] = field(default_factory=Future)
    is_compiled: bool = False
    sessions: set[int] = field(default_factory=set)
    ended_sessions: list[int] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    in_flight: deque[Request] = field(default_factory=deque)
    forked_at: float = 0.0
    deadline: float = 0.0
    used_bytes: int = WORKER_BYTES
    computed_s: float = 0.0
    is_overdue: bool = False
    used_at: float = 0.0
    unsent: bytes = b""
    frames: FrameReader = field(default_factory=FrameReader)

    @property
    def is_compiling(self) -> bool:
        """Whether it was forked and has not compiled yet."""
        return self.connection is not None and not self.is_compiled

    @property
    def is_idle(self) -> bool:
        """Whether it has compiled and has no request."""
        return self.is_compiled and self.current is None

    def leave(self, session: int) -> None:
        """End a session: its waiting requests are dropped."""
        self.sessions.discard(session)
        self.ended_sessions.append(session)
        self.waiting = deque(request for request in self.waiting if request.session != session)

    @property
    def current(self) -> Request | None:
        """The request that it works on."""
        return self.in_flight[0] if self.in_flight else None

    def begin(self) -> None:
        """Move waiting requests into flight, up to `MOST_IN_FLIGHT`."""
        while self.connection is not None and self.waiting and len(self.in_flight) < MOST_IN_FLIGHT:
            request = self.waiting.popleft()
            header = {**request.header, "seconds": self._limit_ms(request) / 1e3}
            if self.ended_sessions:
                header["left"], self.ended_sessions = self.ended_sessions, []
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
        """Send what its socket can take now."""
        if self.unsent and self.connection is not None:
            with suppress(OSError):
                self.unsent = self.unsent[self.connection.send(self.unsent) :]

    def take_answer(self, frame: Frame) -> Request:
        """Take the worker's answer; returns the request that it answers."""
        self.used_bytes, self.computed_s = WORKER_BYTES + int(frame[0]["bytes"]), float(frame[0]["computed_s"])
        request = self.in_flight.popleft()
        if not self.is_overdue:
            self._start_clock()
        self.used_at = time.monotonic()
        return request

    def overdue_error(self) -> InvalidInput:
        """The error of a request that takes too long."""
        name, limit_ms = self._limit
        task = "whose next tokens are found" if name == "step_ms" else "that is compiled"
        return self._limit_error(f"{task} within {limit_ms} ms (grammar.{name})")

    @property
    def _limit(self) -> tuple[str, int]:
        """Name and milliseconds of the limit of the current request."""
        if self.current is not None and self.current.session:
            return "step_ms", self.settings.step_ms
        return "compile_ms", self.settings.compile_ms

    def stalled_error(self) -> PeerUnavailable:
        """The error of a request whose worker got no CPU time."""
        name, limit_ms = self._limit
        why = f"was not run for {limit_ms} ms (grammar.{name}); try again"
        return PeerUnavailable(
            f"{self.grammar.kind.value}: its grammar worker {why}", metadata={"peer": "grammar worker"}
        )

    def exit_error(self, code: int, computed_s: float) -> PacelineError:
        """The error of the current request, from the exit code and the CPU time of the worker."""
        if code == -signal.SIGKILL and self.is_overdue:
            ran = computed_s - self.computed_s >= STALLED_SHARE * self._limit[1] / 1e3
            return self.overdue_error() if ran else self.stalled_error()
        if code == -signal.SIGXCPU:
            return self.overdue_error()
        if code in (-signal.SIGABRT, OUT_OF_MEMORY):
            return self._limit_error(f"that needs at most {self.settings.memory_bytes} bytes (grammar.memory_bytes)")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return self._limit_error("that the library can follow: this one overflowed its stack")
        return self.lost_error(code)

    def lost_error(self, code: int | None = None) -> UnknownSession:
        """The error of sessions whose worker ended for no fault of theirs: they can be opened again."""
        return UnknownSession(f"{self.grammar.kind.value}: its grammar worker has ended ({describe_exit(code)})")

    def _limit_error(self, limit: str) -> InvalidInput:
        return InvalidInput.of(self.grammar.kind.value, self.grammar.text, f"a grammar {limit}")
