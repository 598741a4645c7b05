"""A service's grammars where threads, processes or the pool itself fail: they say so, and the next ones go on."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import psutil
import pytest

from paceline.grammars import pool
from paceline.grammars.host_process import HostProcess
from paceline.grammars.pool import WorkerPool
from paceline.grammars.wire import FrameReader
from paceline.protocol.errors import Overloaded, UnknownSession
from paceline.sampling.grammar import Vocabulary
from tests.grammars.processes import hosts, workers
from tests.grammars.test_workers import END, WAIT_S, eventually, grammars, opened, regex


def test_a_host_for_which_there_is_no_process_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    with grammars() as followed:
        with monkeypatch.context() as limited:
            limited.setattr(subprocess, "Popen", no_process)
            before = psutil.Process().num_fds()
            error = followed.open(regex("a"), (END,), 0).compiled.exception(WAIT_S)
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
        error = followed.open(regex("a"), (END,), 0).compiled.exception(WAIT_S)
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


def test_a_host_that_is_no_longer_wanted_once_it_has_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    def host(vocabulary: Vocabulary) -> HostProcess:
        assert may_go_on.wait(WAIT_S)
        return HostProcess(vocabulary)

    monkeypatch.setattr(pool, "HostProcess", host)
    with grammars() as followed:
        waiting = followed.open(regex("a"), (END,), 0)
    assert isinstance(waiting.compiled.exception(WAIT_S), UnknownSession)
    may_go_on.set()
    eventually(lambda: bool(hosts()), "it starts")
    eventually(lambda: not hosts(), "it has ended")
