"""A service's grammars where threads, processes or the pool itself fail: they say so, and the next ones go on."""

from __future__ import annotations

import signal
import subprocess
import threading
from typing import Any

import psutil
import pytest

from paceline.grammars import pool
from paceline.grammars.host_process import HostProcess
from paceline.grammars.pool import WorkerPool
from paceline.grammars.wire import FrameReader
from paceline.grammars.worker_handle import Request, WorkerHandle
from paceline.protocol.errors import Code, InvalidInput, Overloaded, PacelineError, PeerUnavailable, UnknownSession
from paceline.runtime.config import GrammarSettings
from paceline.sampling.grammar import Vocabulary
from tests.grammars.processes import hosts, workers
from tests.grammars.test_workers import WAIT_S, eventually, grammars, opened
from tests.sampling.random_schemas import END
from tests.sampling.test_grammar import regex


def test_a_host_for_which_there_is_no_process_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    with grammars() as followed:
        with monkeypatch.context() as limited:
            limited.setattr(subprocess, "Popen", no_process)
            before = psutil.Process().num_fds()
            error = followed.open(regex("a"), (END,), 0).compilation.exception(WAIT_S)
            assert isinstance(error, BlockingIOError)
            assert psutil.Process().num_fds() == before
        assert opened(followed, regex("a"))


@pytest.mark.parametrize("place", [0, 1])
def test_without_a_thread_its_grammars_fail_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def fails_once(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == place + 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_once)
    with grammars() as followed:
        error = followed.open(regex("a"), (END,), 0).compilation.exception(WAIT_S)
        assert error is None or isinstance(error, Overloaded)
        assert opened(followed, regex("ab")).ask([], [[]]).result(WAIT_S)[0]


def test_a_worker_that_says_what_it_may_not_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with grammars() as followed:
        other, running = opened(followed, regex("ab")), opened(followed, regex("cd"))
        kept = hosts()
        with monkeypatch.context() as broken:
            broken.setattr(FrameReader, "feed", lambda *_: iter([({"taken": 0}, b"")]))
            asked = [running.ask([], [[]]) for _ in range(3)]
            assert {type(each.exception(WAIT_S)) for each in asked} == {UnknownSession}
        eventually(lambda: len(workers()) == 1, "its worker has ended")
        assert other.ask([], [[]]).result(WAIT_S)[0]
        assert opened(followed, regex("cd")).ask([], [[]]).result(WAIT_S)[0]
        assert hosts() == kept


def test_a_host_that_nobody_reads_any_more_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a defect")

    with grammars() as followed:
        running = opened(followed, regex("ab"))
        (lost,) = hosts()
        with monkeypatch.context() as broken:
            broken.setattr(WorkerPool, "_end_overdue", fails)
            # The answer may be there before the defect meets the thread.
            assert isinstance(running.ask([], [[]]).exception(WAIT_S), UnknownSession | None)
            eventually(lambda: not lost.is_running(), "the host has ended")
        assert isinstance(running.ask([], [[]]).exception(WAIT_S), UnknownSession)
        assert opened(followed, regex("ab")).ask([], [[]]).result(WAIT_S)[0]


def test_a_stopped_worker_is_no_fault_of_its_grammar() -> None:
    with grammars(GrammarSettings(step_ms=200)) as followed:
        stopped, behind = opened(followed, regex("ab")), opened(followed, regex("ab"))
        (worker,) = workers()
        other = opened(followed, regex("cd"))
        worker.suspend()
        asked, waiting = stopped.ask([], [[]]), behind.ask([], [[]])
        assert other.ask([], [[]]).result(WAIT_S)[0], "nobody else waits"
        error = asked.exception(WAIT_S)
        assert isinstance(error, PeerUnavailable)
        assert error.code is Code.UNAVAILABLE and "was not run for 200 ms (grammar.step_ms)" in error.message
        assert isinstance(waiting.exception(WAIT_S), UnknownSession)
        assert opened(followed, regex("ab")).ask([ord("a")], [[]]).result(WAIT_S)[0], "another worker follows it"
        assert worker.pid not in {each.pid for each in workers()}


def test_a_stopped_host_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "KILL_TIMEOUT_S", 0.2)
    with grammars(GrammarSettings(compile_ms=300)) as followed:
        opened(followed, regex("ab"))
        (host,) = hosts()
        host.suspend()
        error = followed.open(regex("cd"), (END,), 0).compilation.exception(WAIT_S)
        assert isinstance(error, PeerUnavailable)
        eventually(lambda: not host.is_running(), "the host has ended")
        assert opened(followed, regex("cd")).ask([ord("c")], [[]]).result(WAIT_S)[0]


@pytest.mark.parametrize(
    ("computed_s", "error"), [(2.01, PeerUnavailable), (2.06, InvalidInput), (3.0, InvalidInput)]
)
def test_the_seconds_that_a_worker_computed_say_whose_fault_it_is(
    computed_s: float, error: type[PacelineError]
) -> None:
    worker = WorkerHandle(1, regex("a"), GrammarSettings(step_ms=1_000), computed_s=2.0, is_overdue=True)
    worker.in_flight.append(Request(7, {}))
    assert isinstance(worker.exit_error(-signal.SIGKILL, computed_s), error)
    worker.is_overdue = False
    assert isinstance(worker.exit_error(-signal.SIGKILL, computed_s), UnknownSession), "somebody else killed it"


def test_a_host_that_is_no_longer_wanted_once_it_has_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    def host(vocabulary: Vocabulary) -> HostProcess:
        assert may_go_on.wait(WAIT_S)
        return HostProcess(vocabulary)

    monkeypatch.setattr(pool, "HostProcess", host)
    with grammars() as followed:
        waiting = followed.open(regex("a"), (END,), 0)
    assert isinstance(waiting.compilation.exception(WAIT_S), UnknownSession)
    may_go_on.set()
    eventually(lambda: bool(hosts()), "it starts")
    eventually(lambda: not hosts(), "it has ended")
