"""Services that stop, and services whose supervisor does: what runs comes to its end, and nothing is left behind."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from paceline.client import Client
from paceline.client.shared import Collector
from paceline.local.service_process import is_serving
from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.generation import GenerateRequest
from tests.cli.test_supervisor import STOP_SECONDS, ServeCommand, serving
from tests.e2e.cluster import Cluster, eventually, free_port, full

SLOW = "table:vocab=300,seed=1,eos=299,step_ms=20"
LENGTH = 60
"""Tokens of a generation that is under way while a target drains: more than a second."""
DRAIN_SECONDS = 60.0
AT_ONCE_S = 1.0
KILLED = 128 + signal.SIGTERM
MOST_REFUSALS = 10
"""Of a session that is tried again every half second while another one's generation ends."""


def request(length: int = LENGTH, seed: int = 23) -> GenerateRequest:
    return GenerateRequest(token_ids=(10, 200, 30), seed=seed, max_new_tokens=length, ignore_eos=True)


class Running:
    """A generation in a thread; it has begun when this is made."""

    def __init__(self, address: str, request: GenerateRequest) -> None:
        self._text, self._begun = Collector(), threading.Event()
        self._ended = ThreadPoolExecutor(1).submit(self._run, address, request)
        assert self._begun.wait(STOP_SECONDS)

    def _run(self, address: str, request: GenerateRequest) -> tuple[int, ...]:
        with Client(address, resume_wait_s=0) as client:
            for event in client.stream(request):
                self._text.add(event)
                if self._text.token_ids:
                    self._begun.set()
        return self._text.generation().token_ids

    @property
    def runs(self) -> bool:
        return not self._ended.done()

    def token_ids(self) -> tuple[int, ...]:
        """What it has generated once it has ended. Raises what ended it."""
        return self._ended.result(STOP_SECONDS)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=AT_ONCE_S).close()
    except OSError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


@pytest.fixture(autouse=True)
def hang_ups_end_what_is_started() -> Iterator[None]:
    """Also where the suite itself was started to outlive its terminal: children inherit what is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGKILL, 2), full(signal.SIGHUP, 1)])
def test_services_and_ranks_end_with_their_supervisor(tmp_path: Path, number: signal.Signals, ranks: int) -> None:
    with serving(tmp_path, "--drafter", "model:table:vocab=300,seed=1,eos=299", "-tp", str(ranks)) as command:
        command.wait_ready()
        pids = descendants(command.process.pid)
        assert len(pids) >= 2 + ranks, "three services, and a rank beside the first"
        assert set(command.pids.values()) <= set(pids)
        command.process.send_signal(number)
        code, out, err = command.finish()
        assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0), err
        assert out.endswith("stopped\n") == (number is signal.SIGHUP)
        eventually(lambda: all(is_gone(pid) for pid in pids), "no process is left", STOP_SECONDS)
        eventually(lambda: not any(map(accepts, command.services.values())), "nobody listens")


def test_sigterm_lets_a_generation_finish(tmp_path: Path) -> None:
    with serve_slow(tmp_path) as command:
        with Client(command.address) as client:
            undisturbed = client.generate(request(LENGTH // 2))
        running = Running(command.address, request(LENGTH // 2))
        command.process.terminate()
        assert running.token_ids() == undisturbed.token_ids
        code, out, err = command.finish()
    assert (code, err) == (0, "")
    assert out.endswith("stopped\n")


def test_a_second_sigterm_ends_everything_at_once(tmp_path: Path) -> None:
    with serve_slow(tmp_path) as command:
        running = Running(command.address, request(2000))
        command.process.terminate()
        eventually(lambda: not accepts(command.address), "the coordinator drains")
        assert running.runs
        sent = time.monotonic()
        command.process.terminate()
        code, _, _ = command.finish()
        assert time.monotonic() - sent < AT_ONCE_S
        assert code == KILLED
        assert all(is_gone(pid) for pid in command.pids.values())
        with pytest.raises(PeerUnavailable):
            running.token_ids()


@contextmanager
def serve_slow(folder: Path) -> Iterator[ServeCommand]:
    command = ServeCommand(folder, "--drafter", "none", "--drain-seconds", str(DRAIN_SECONDS), model=SLOW)
    try:
        command.wait_ready()
        yield command
    finally:
        command.process.kill()
        command.process.communicate(timeout=STOP_SECONDS)


def test_a_target_that_drains_finishes_its_sessions_and_new_ones_wait_for_the_next_target(tmp_path: Path) -> None:
    flags: dict[str, object] = {"server.drain_seconds": DRAIN_SECONDS, "server.health_port": free_port()}
    health = f"127.0.0.1:{flags['server.health_port']}"
    with Cluster(tmp_path, target_model=SLOW, drafters=(), target_flags=flags) as cluster:
        with ThreadPoolExecutor(2) as pool, cluster.client() as client:
            whole = pool.map(client.generate, (request(seed=seed) for seed in (1, 2)))
            first, second = (generation.token_ids for generation in whole)
        running = Running(cluster.address, request(seed=1))
        target = cluster.processes["target"]
        target.signal(signal.SIGTERM)
        eventually(lambda: not is_serving(health), "health says NOT_SERVING")
        assert running.runs
        with ThreadPoolExecutor(1) as pool, cluster.client(resume_wait_s=0) as client:
            waiting = pool.submit(client.generate, request(seed=2))
            eventually(lambda: refusals(cluster) > 0, "the target refuses the new session")
            assert running.runs, "beside it the other one goes on"
            assert running.token_ids() == first
            assert target.wait(STOP_SECONDS) == 0
            assert not waiting.done()
            cluster.restart("target")
            assert waiting.result(STOP_SECONDS).token_ids == second
        assert refusals(cluster) <= MOST_REFUSALS


def refusals(cluster: Cluster) -> int:
    return cluster.processes["coordinator"].log_file.read_text().count("is draining and takes no new session")
