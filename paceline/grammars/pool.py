"""The grammar workers of a service: one for each grammar that sessions follow, or followed recently."""

from __future__ import annotations

import itertools
import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from paceline.grammars.host_process import HostProcess
from paceline.grammars.wire import Frame
from paceline.grammars.worker_handle import Request, WorkerHandle
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import InvalidInput, Overloaded, PacelineError
from paceline.protocol.sampling import Grammar
from paceline.runtime.config import GrammarSettings
from paceline.sampling.grammar import Vocabulary

logger = logging.getLogger(__name__)

LONG_COMPILE_S = 0.25
"""A compilation that takes longer is long; ordinary schemas take some milliseconds."""
MAX_IDLE_WORKERS = 64
"""Most workers without a session; chosen, not tuned."""
RETRY_AFTER_MS = 1_000
KILL_TIMEOUT_S = 1.0
"""Longest time for the host to kill a worker and report its CPU time."""
DEFAULTS = GrammarSettings()
_PIECE = 1 << 18
T = TypeVar("T")


class WorkerPool:
    """Grammar workers over one tokenizer. May be called from any thread; no call blocks.

    A thread of its own starts the host, reads the workers' answers and ends workers that take too long. Futures
    are settled with no lock held, on that thread or on a caller's.

    Args:
        load: loads the tokenizer; called for the first grammar, on that thread.
        settings: limits of grammars.
    """

    def __init__(self, load: Callable[[], Tokenizer], settings: GrammarSettings = DEFAULTS) -> None:
        self.vocabulary: Vocabulary | None = None
        """Set once a grammar has compiled."""
        self._load = load
        self._settings = settings
        self._lock = threading.Lock()
        self._host: HostProcess | None = None
        self._starting = False
        self._closed = False
        self._workers: dict[int, WorkerHandle] = {}
        self._by_grammar: dict[Grammar, WorkerHandle] = {}
        self._to_fork: deque[WorkerHandle] = deque()
        self._ids = itertools.count(1)
        self._due: deque[tuple[Future[Frame], Frame | Exception]] = deque()
        self._needs_trim = False
        """Whether the number or the memory of workers has grown since the last trim."""
        self._asleep = False
        """Whether the pool's thread waits without a deadline."""
        self._poll_s = min(LONG_COMPILE_S, settings.compile_ms / 4e3, settings.step_ms / 4e3)
        """How often it checks for new deadlines."""

    @property
    def size(self) -> int:
        """Number of workers; may be read on any thread."""
        return len(self._workers)

    def join(self, grammar: Grammar) -> tuple[int, WorkerHandle]:
        """Open a session of a grammar. Returns its id and its worker, which is created for a new grammar."""
        with self._settling():
            session = next(self._ids)
            worker = self._by_grammar.get(grammar)
            if worker is None:
                worker = WorkerHandle(next(self._ids), grammar, self._settings)
                compile_ = {"compile": grammar.kind.value, "text": grammar.text}
                worker.waiting.append(Request(0, compile_, worker.compilation))
                self._workers[worker.id] = self._by_grammar[grammar] = worker
                self._to_fork.append(worker)
            worker.sessions.add(session)
            return session, worker

    def ask(self, worker: WorkerHandle, session: int, header: dict[str, Any]) -> Future[Frame]:
        """Send a request to a session's worker. The future gets a `PacelineError` if the worker can't answer."""
        request = Request(session, {"session": session, **header})
        with self._settling():
            if worker.id in self._workers:
                worker.waiting.append(request)
                self._send_next(worker)
            else:
                self._due.append((request.answer, worker.lost_error()))
        return request.answer

    def leave(self, worker: WorkerHandle, session: int) -> None:
        """End a session. Its worker ends, too, if it is busy and has no other session."""
        with self._settling():
            if worker.id not in self._workers or session not in worker.sessions:
                return
            worker.leave(session)
            self._needs_trim = True
            if not worker.sessions and not worker.is_idle:
                self._end(worker, worker.lost_error())

    def close(self) -> None:
        """End every worker, and the host. Harmless when repeated."""
        with self._settling():
            self._closed = True
            self._end_all()
            if self._host is not None:
                self._host.wake()

    # The methods below hold the lock.

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Hold the lock; then fork and trim workers as far as limits allow, and settle futures after its release."""
        with self._lock:
            yield
            self._settle()
        while True:
            try:
                answer, result = self._due.popleft()
            except IndexError:
                return
            settle(answer, result)

    def _settle(self) -> None:
        """Fork the workers that have a place, and end those that exceed the memory limit."""
        if self._host is None:
            if self._to_fork and not self._starting and not self._closed:
                self._begin()
            return
        while self._to_fork and self._has_place():
            self._fork(self._host, self._to_fork.popleft())
        if self._needs_trim:
            self._needs_trim = False
            self._trim()

    def _begin(self) -> None:
        """Have a thread start the host. If no thread can be started, the waiting grammars fail."""
        try:
            threading.Thread(target=self._run, name="grammars", daemon=True).start()
        except RuntimeError as error:
            self._fail_waiting(Overloaded(f"grammars: {error}", retry_after_ms=RETRY_AFTER_MS))
        else:
            self._starting = True

    def _fail_waiting(self, error: Exception) -> None:
        """Fail the grammars that wait for the host, which was not started."""
        logger.warning("grammar host not started: error=%s", error)
        for worker in [*self._to_fork]:
            self._end(worker, error)

    def _has_place(self) -> bool:
        """Whether another grammar may be compiled. Long compilations don't keep short ones waiting."""
        compiling = [worker for worker in self._workers.values() if worker.is_compiling]
        cutoff = time.monotonic() - LONG_COMPILE_S
        recent, most = sum(worker.forked_at > cutoff for worker in compiling), self._settings.workers
        return recent < most and len(compiling) < 2 * most

    def _fork(self, host: HostProcess, worker: WorkerHandle) -> None:
        try:
            worker.connection = host.fork(worker.id, self._settings.memory_bytes)
        except OSError as error:
            logger.warning("grammar worker not forked: error=%s", error)
            self._end(worker, worker.lost_error())
            return
        worker.forked_at = time.monotonic()
        host.selector.register(worker.connection, selectors.EVENT_READ, worker)
        self._send_next(worker)

    def _send_next(self, worker: WorkerHandle) -> None:
        """Send a worker its next requests, if it can take any."""
        worker.begin()
        worker.send()
        if worker.connection is None or self._host is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self._host.selector.modify(worker.connection, events, worker)
        if self._asleep and worker.current is not None:
            self._asleep = False
            self._host.wake()

    def _trim(self) -> None:
        """End idle workers, the longest unused first, while workers exceed their number or memory.

        If that isn't enough, the largest worker ends: its sessions may be opened again when there is memory.
        """
        workers = [worker for worker in self._workers.values() if worker.is_compiled]
        idle = sorted((worker for worker in workers if not worker.sessions), key=lambda worker: worker.used_at)
        total, most = sum(worker.used_bytes for worker in workers), self._settings.cache_bytes
        while idle and (len(idle) > MAX_IDLE_WORKERS or total > most):
            total -= idle[0].used_bytes
            workers.remove(idle[0])
            self._end(idle[0], idle[0].lost_error())
            del idle[0]
        if total > most and len(workers) > 1:
            error = Overloaded(
                f"grammar.cache_bytes = {most}: the grammars of open sessions take more",
                retry_after_ms=RETRY_AFTER_MS,
            )
            self._end(max(workers, key=lambda worker: worker.used_bytes), error)

    def _end(self, worker: WorkerHandle, error: Exception, others: Exception | None = None) -> None:
        """Kill a worker and forget it.

        Args:
            worker: the worker.
            error: of its current request.
            others: of the requests after that; None: the same error.
        """
        self._forget(worker)
        if worker.connection is not None and self._host is not None:
            self._disconnect(worker)
            self._host.kill(worker.id)
        if worker.current is not None:
            self._due.append((worker.in_flight.popleft().answer, error))
        self._due.extend((request.answer, others or error) for request in (*worker.in_flight, *worker.waiting))
        worker.in_flight.clear()
        worker.waiting.clear()

    def _end_all(self) -> None:
        for worker in [*self._workers.values()]:
            self._end(worker, worker.lost_error())

    def _forget(self, worker: WorkerHandle) -> None:
        self._workers.pop(worker.id, None)
        self._retire(worker)
        with suppress(ValueError):
            self._to_fork.remove(worker)

    def _retire(self, worker: WorkerHandle) -> None:
        """Give a worker no new sessions."""
        if self._by_grammar.get(worker.grammar) is worker:
            del self._by_grammar[worker.grammar]

    def _disconnect(self, worker: WorkerHandle) -> None:
        assert worker.connection is not None, "it was forked"
        assert self._host is not None, "by the host"
        self._host.selector.unregister(worker.connection)
        worker.connection.close()
        worker.connection = None

    # On the pool's thread.

    def _run(self) -> None:
        """Load the tokenizer, start the host and read its messages. If it can't start, the waiting grammars fail."""
        try:
            vocabulary = Vocabulary.of(self._load())
            host = HostProcess(vocabulary)
        except Exception as error:  # noqa: BLE001  every error goes to the waiting grammars
            with self._settling():
                self._starting = False
                self._fail_waiting(error)
            return
        with self._settling():
            self._starting = False
            self.vocabulary, self._host = vocabulary, host
            if self._closed:
                host.wake()
        self._watch(host)

    def _watch(self, host: HostProcess) -> None:
        """Read messages of the host and the workers until the pool is closed or the host has ended."""
        try:
            while self._read_ready(host, host.selector.select(self._time_left())):
                pass
        except Exception:
            # Without this, sessions would wait for ever for a host that nobody reads any more.
            logger.exception("grammar host ended")
        with self._settling():
            self._end_all()
            self._host = None
        host.close()

    def _read_ready(self, host: HostProcess, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> bool:
        """Read ready messages, and end workers that take too long. False: the pool or the host has ended."""
        with self._settling():
            host.awake()
            for key, events in ready:
                if key.fileobj is host.control and not self._read_host(host):
                    return False
                if isinstance(key.data, WorkerHandle):
                    self._serve(key.data, events)
            self._end_overdue()
            return not self._closed

    def _time_left(self) -> float | None:
        """Seconds until deadlines are checked again; None: no worker is busy."""
        with self._lock:
            deadlines = [worker.deadline for worker in self._workers.values() if worker.current is not None]
            self._asleep = not deadlines
        return max(0.0, min(min(deadlines) - time.monotonic(), self._poll_s)) if deadlines else None

    def _end_overdue(self) -> None:
        """Kill workers past their deadline; their CPU time decides the error. A silent host ends, too."""
        now = time.monotonic()
        for worker in [*self._workers.values()]:
            if worker.current is None or now < worker.deadline or self._host is None:
                continue
            if worker.is_overdue:
                self._fail(worker, worker.stalled_error(), worker.lost_error())
                self._host.kill_host()
            else:
                worker.is_overdue, worker.deadline = True, now + KILL_TIMEOUT_S
                self._retire(worker)
                self._host.kill(worker.id)

    def _fail(self, worker: WorkerHandle, error: PacelineError, lost_error: PacelineError) -> None:
        """End a worker that failed at its current request. If it had compiled, a new one may serve later requests."""
        kind, size = worker.grammar.kind.value, len(worker.grammar.text)
        why = error.metadata.get("limit", error.message)
        logger.warning("grammar worker ended: kind=%s characters=%d must_be=%s", kind, size, why)
        self._end(worker, error, lost_error if worker.is_compiled else error)

    def _serve(self, worker: WorkerHandle, events: int) -> None:
        """Read a worker's answers, and send it what its socket could not take before."""
        if worker.connection is None:
            return
        if events & selectors.EVENT_READ:
            try:
                piece = worker.connection.recv(_PIECE)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece:
                # The host says how it ended.
                self._disconnect(worker)
                return
            try:
                for frame in worker.frames.feed(piece):
                    if worker.id in self._workers:
                        self._take_answer(worker, frame)
            except Exception:
                # The worker follows a stranger's grammar, so its messages are not to be trusted.
                logger.exception("grammar worker ended: it sent a malformed answer")
                self._end(worker, worker.lost_error())
        if worker.id in self._workers:
            self._send_next(worker)

    def _take_answer(self, worker: WorkerHandle, frame: Frame) -> None:
        # A malformed frame raises here, while the request is still the worker's.
        error = frame[0].get("error")
        refusal = InvalidInput(error, metadata=frame[0]["facts"]) if error is not None else None
        previous_bytes, request = worker.used_bytes, worker.take_answer(frame)
        self._needs_trim = self._needs_trim or not worker.is_compiled or worker.used_bytes > previous_bytes
        self._due.append((request.answer, refusal or frame))
        if not request.session and refusal is not None:
            self._end(worker, refusal)
        elif refusal is not None:
            # The state that matchers of a grammar share may be broken.
            self._retire(worker)
        worker.is_compiled = True

    def _read_host(self, host: HostProcess) -> bool:
        """Read which workers have ended. False: the host has ended."""
        try:
            for id_, code, computed_s in host.exits():
                worker = self._workers.get(id_)
                if worker is not None:
                    self._fail(worker, worker.exit_error(code, computed_s), worker.lost_error(code))
        except (EOFError, OSError):
            return False
        return True


def settle(answer: Future[T], result: T | Exception) -> None:
    """Settle a future, unless its owner has cancelled it."""
    with suppress(InvalidStateError):
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)
