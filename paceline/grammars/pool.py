"""The grammar workers of a service: one for each grammar that is followed, or was of late."""

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

LONG_S = 0.25
"""A compilation that takes longer is long; ordinary schemas take some milliseconds."""
KEPT_WORKERS = 64
"""Most workers without a session; chosen, not tuned."""
RETRY_AFTER_MS = 1_000
HEARD_S = 1.0
"""Longest that a host may take to kill a worker and say what it used."""
DEFAULTS = GrammarSettings()
_PIECE = 1 << 18
T = TypeVar("T")


class WorkerPool:
    """Grammar workers over one tokenizer. May be called from any thread; no call blocks.

    A thread of its own starts their host, reads what workers answer and ends those that take too long. Futures
    are settled with no lock held, on that thread or on a caller's.

    Args:
        load: the tokenizer; called by the first grammar, on that thread.
        settings: what grammars may take.
    """

    def __init__(self, load: Callable[[], Tokenizer], settings: GrammarSettings = DEFAULTS) -> None:
        self.vocabulary: Vocabulary | None = None
        """Known once a grammar has compiled."""
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
        self._grown = False
        """Whether workers may be too many, or take too much, for the first time."""
        self._asleep = False
        """Whether the thread that watches knows of no deadline."""
        self._look_s = min(LONG_S, settings.compile_ms / 4e3, settings.step_ms / 4e3)
        """How often it looks for new deadlines."""

    @property
    def size(self) -> int:
        """Workers that there are; may be asked on any thread."""
        return len(self._workers)

    def join(self, grammar: Grammar) -> tuple[int, WorkerHandle]:
        """Begin to follow a grammar: the session's id, and the worker, which may have to be made."""
        with self._settling():
            session = next(self._ids)
            worker = self._by_grammar.get(grammar)
            if worker is None:
                worker = WorkerHandle(next(self._ids), grammar, self._settings)
                compile_ = {"compile": grammar.kind.value, "text": grammar.text}
                worker.waiting.append(Request(0, compile_, worker.compiled))
                self._workers[worker.id] = self._by_grammar[grammar] = worker
                self._to_fork.append(worker)
            worker.sessions.add(session)
            return session, worker

    def ask(self, worker: WorkerHandle, session: int, header: dict[str, Any]) -> Future[Frame]:
        """Ask a session's worker; if it can't answer, the future has a `PacelineError`."""
        request = Request(session, {"session": session, **header})
        with self._settling():
            if worker.id in self._workers:
                worker.waiting.append(request)
                self._go_on(worker)
            else:
                self._due.append((request.answer, worker.lost()))
        return request.answer

    def leave(self, worker: WorkerHandle, session: int) -> None:
        """A session has ended: what its worker does for nobody else ends, and so does a compilation."""
        with self._settling():
            if worker.id not in self._workers or session not in worker.sessions:
                return
            worker.leave(session)
            self._grown = True
            if not worker.sessions and not worker.is_idle:
                self._end(worker, worker.lost())

    def close(self) -> None:
        """End every worker, and the host. Harmless when repeated."""
        with self._settling():
            self._closed = True
            self._end_all()
            if self._host is not None:
                self._host.wake()

    # What holds the lock.

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Hold the lock; then do what has become possible, and settle futures behind it."""
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
        """Fork what there is a place for; end what there is no memory for."""
        if self._host is None:
            if self._to_fork and not self._starting and not self._closed:
                self._begin()
            return
        while self._to_fork and self._has_place():
            self._fork(self._host, self._to_fork.popleft())
        if self._grown:
            self._grown = False
            self._trim()

    def _begin(self) -> None:
        """Have a thread start the host; where there is none to be had, the grammars that wait for it fail."""
        try:
            threading.Thread(target=self._run, name="grammars", daemon=True).start()
        except RuntimeError as error:
            self._fail_waiting(Overloaded(f"grammars: {error}", retry_after_ms=RETRY_AFTER_MS))
        else:
            self._starting = True

    def _fail_waiting(self, error: Exception) -> None:
        """The host was not started."""
        logger.warning("grammar host not started: error=%s", error)
        for worker in [*self._to_fork]:
            self._end(worker, error)

    def _has_place(self) -> bool:
        """Whether another grammar may be compiled; those that take long make room for others, which seldom do."""
        compiling = [worker for worker in self._workers.values() if worker.is_compiling]
        begun = time.monotonic() - LONG_S
        quick, most = sum(worker.forked > begun for worker in compiling), self._settings.workers
        return quick < most and len(compiling) < 2 * most

    def _fork(self, host: HostProcess, worker: WorkerHandle) -> None:
        try:
            worker.connection = host.fork(worker.id, self._settings.memory_bytes)
        except OSError as error:
            logger.warning("grammar worker not forked: error=%s", error)
            self._end(worker, worker.lost())
            return
        worker.forked = time.monotonic()
        host.selector.register(worker.connection, selectors.EVENT_READ, worker)
        self._go_on(worker)

    def _go_on(self, worker: WorkerHandle) -> None:
        """Send a worker its next request, if it can take one."""
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
        """End workers without a session, the longest unused first, while they are too many or take too much.

        If that isn't enough, the largest ends: its sessions may be opened again when there is room.
        """
        done = [worker for worker in self._workers.values() if worker.is_compiled]
        idle = sorted((worker for worker in done if not worker.sessions), key=lambda worker: worker.used)
        total, most = sum(worker.taken_bytes for worker in done), self._settings.cache_bytes
        while idle and (len(idle) > KEPT_WORKERS or total > most):
            total -= idle[0].taken_bytes
            done.remove(idle[0])
            self._end(idle[0], idle[0].lost())
            del idle[0]
        if total > most and len(done) > 1:
            error = Overloaded(
                f"grammar.cache_bytes = {most}: the grammars that are followed now take more",
                retry_after_ms=RETRY_AFTER_MS,
            )
            self._end(max(done, key=lambda worker: worker.taken_bytes), error)

    def _end(self, worker: WorkerHandle, error: Exception, others: Exception | None = None) -> None:
        """Kill a worker and forget it.

        Args:
            worker: to end.
            error: of what it works on.
            others: of what waits behind that, where it differs.
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
            self._end(worker, worker.lost())

    def _forget(self, worker: WorkerHandle) -> None:
        self._workers.pop(worker.id, None)
        self._hide(worker)
        with suppress(ValueError):
            self._to_fork.remove(worker)

    def _hide(self, worker: WorkerHandle) -> None:
        """Give no new session to a worker."""
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
        """Load the tokenizer and start the host, then read what it says; if it can't start, those who wait fail."""
        try:
            vocabulary = Vocabulary.of(self._load())
            host = HostProcess(vocabulary)
        except Exception as error:  # noqa: BLE001  whatever it is, it is for those who wait
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
        """Read what comes from the host and the workers until the pool is closed or the host has ended."""
        try:
            while self._read(host, host.selector.select(self._time_left())):
                pass
        except Exception:
            # A host that nobody reads any more would keep waiting whoever follows a grammar.
            logger.exception("grammar host ended")
        with self._settling():
            self._end_all()
            self._host = None
        host.close()

    def _read(self, host: HostProcess, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> bool:
        """Take in what has come, and end workers that take too long; False: it is over."""
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
        """Seconds until workers are looked after; None: nothing is under way."""
        with self._lock:
            deadlines = [worker.deadline for worker in self._workers.values() if worker.current is not None]
            self._asleep = not deadlines
        return max(0.0, min(min(deadlines) - time.monotonic(), self._look_s)) if deadlines else None

    def _end_overdue(self) -> None:
        """Kill workers that take too long: what they computed says whose fault it is. A host that is silent ends."""
        now = time.monotonic()
        for worker in [*self._workers.values()]:
            if worker.current is None or now < worker.deadline or self._host is None:
                continue
            if worker.is_overdue:
                self._give_up(worker, worker.stalled(), worker.lost())
                self._host.kill_host()
            else:
                worker.is_overdue, worker.deadline = True, now + HEARD_S
                self._hide(worker)
                self._host.kill(worker.id)

    def _give_up(self, worker: WorkerHandle, error: PacelineError, lost: PacelineError) -> None:
        """A worker has failed at what it works on; what waits behind that could go on with another, once compiled."""
        kind, size = worker.grammar.kind.value, len(worker.grammar.text)
        why = error.metadata.get("limit", error.message)
        logger.warning("grammar worker ended: kind=%s characters=%d must_be=%s", kind, size, why)
        self._end(worker, error, lost if worker.is_compiled else error)

    def _serve(self, worker: WorkerHandle, events: int) -> None:
        """Read answers of a worker, and send it what it could not take before."""
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
                        self._answered(worker, frame)
            except Exception:
                # Who follows grammars that strangers wrote may say anything.
                logger.exception("grammar worker ended: it said what it may not")
                self._end(worker, worker.lost())
        if worker.id in self._workers:
            self._go_on(worker)

    def _answered(self, worker: WorkerHandle, frame: Frame) -> None:
        # First what fails where the frame is not as it should be: the request is still the worker's then.
        error = frame[0].get("error")
        refusal = InvalidInput(error, metadata=frame[0]["facts"]) if error is not None else None
        before, request = worker.taken_bytes, worker.answered(frame)
        self._grown = self._grown or not worker.is_compiled or worker.taken_bytes > before
        self._due.append((request.answer, refusal or frame))
        if not request.session and refusal is not None:
            self._end(worker, refusal)
        elif refusal is not None:
            # What matchers of a grammar share may be of no more use.
            self._hide(worker)
        worker.is_compiled = True

    def _read_host(self, host: HostProcess) -> bool:
        """Hear which workers have ended; False: the host has."""
        try:
            for id_, code, computed_s in host.ended():
                worker = self._workers.get(id_)
                if worker is not None:
                    self._give_up(worker, worker.ending(code, computed_s), worker.lost(code))
        except (EOFError, OSError):
            return False
        return True


def settle(answer: Future[T], result: T | Exception) -> None:
    """Settle a future, unless whoever waited for it has given up."""
    with suppress(InvalidStateError):
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)
