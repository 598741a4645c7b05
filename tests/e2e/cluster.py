"""Three real services in processes of their own, and the means to hurt them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.client import AsyncClient, Client
from paceline.local.service_process import Flags, ServiceName
from paceline.local.services import LocalServices
from paceline.local.tls import peer_tls, server_tls
from paceline.runtime.roles import PeerRole

START_SECONDS = 60.0
POLL_SECONDS = 0.01
NEVER_EPHEMERAL = (15_000, 32_000)
"""Below those that systems give to clients."""
_TAKEN_PORTS: set[int] = set()
TARGET = "table:vocab=64,seed=1"
NEAR = "table:vocab=64,seed=1,noise=0.3"


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until a condition holds; fail naming it."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_SECONDS)


def full(*values: object) -> Any:
    """A test's parameters in `make test-full` alone."""
    return pytest.param(*values, marks=pytest.mark.full)


def free_port() -> int:
    """A port that is free now, and that nobody is given meanwhile: no connection by chance, and no other test.

    Each worker of a run takes ports of its own, none twice.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.randrange(NEVER_EPHEMERAL[0] + worker, NEVER_EPHEMERAL[1], workers)
        if port in _TAKEN_PORTS:
            continue
        _TAKEN_PORTS.add(port)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def ranks_of(pid: int | None) -> list[psutil.Process]:
    """The processes beside a target service's own that share its model."""
    return [child for child in psutil.Process(pid).children() if "spawn_main" in f"{child.name()} {child.cmdline()}"]


class Cluster(LocalServices):
    """A target, a draft service (unless `drafters` is empty) and a coordinator, on ports that are known beforehand.

    target_proxy: host:port that the coordinator dials instead of the target's own.
    """

    def __init__(
        self,
        folder: Path,
        target_model: str = TARGET,
        drafters: tuple[str, ...] = (f"model:{NEAR}",),
        target_flags: Flags | None = None,
        draft_flags: Flags | None = None,
        coordinator_flags: Flags | None = None,
        environment: Mapping[str, str] | None = None,
        tls: Path | None = None,
        start_s: float = START_SECONDS,
    ) -> None:
        super().__init__(folder, environment=environment, start_timeout_s=start_s, tls=tls)
        self.target_model = target_model
        self.drafters = drafters
        self.target_proxy: str | None = None
        self.ports = {name: free_port() for name in ("target", "draft", "coordinator")}
        self._flags_by_name = {"target": target_flags, "draft": draft_flags, "coordinator": coordinator_flags}

    def start_all(self) -> None:
        names: tuple[ServiceName, ...] = ("target", "draft", "coordinator")
        for name in names:
            if name != "draft" or self.drafters:
                self.start(name, name, self._settings(name))
        self.await_serving(*self.processes)
        self.await_links()

    def restart(self, name: ServiceName) -> None:
        """Start a service again, killed if it still runs, configured as the cluster says by now."""
        self.kill(name)
        self.start(name, name, self._settings(name))
        self.await_serving(name)

    def client(self, **options: Any) -> Client:
        return Client(self.reach("coordinator"), **options)

    def async_client(self, **options: Any) -> AsyncClient:
        return AsyncClient(self.reach("coordinator"), **options)

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Wait until no service holds a session or a KV row."""
        for label, process in self.processes.items():
            if process.name in ("target", "draft"):
                eventually(partial(self._idle, label), f"{label} holds nothing", timeout_s)

    def _idle(self, label: str) -> bool:
        status = self.status(label)
        return status.sessions == 0 and status.kv_rows == 0

    def _settings(self, name: ServiceName) -> Flags:
        flags: dict[ServiceName, Flags] = {
            "target": {"model": self.target_model},
            "draft": {"drafters": list(self.drafters)},
            "coordinator": {
                "model": self.target_model,
                "target.address": self.target_proxy or f"127.0.0.1:{self.ports['target']}",
                "draft.address": f"127.0.0.1:{self.ports['draft']}" if self.drafters else None,
                "reconnect_max_ms": 200.0,
                **peer_tls(self.tls),
            },
        }
        common = {"server.port": self.ports[name], **server_tls(self.tls, PeerRole(name))}
        return common | flags[name] | (self._flags_by_name[name] or {})


def cluster_fixture(target_model: str = TARGET, *drafts: str, **settings: Any) -> Any:
    """A fixture: one cluster for a whole module, whose drafters are models of these names."""

    @pytest.fixture(scope="module")
    def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
        drafters = tuple(f"model:{draft}" for draft in drafts)
        with Cluster(tmp_path_factory.mktemp("services"), target_model, drafters, **settings) as cluster:
            yield cluster

    return services
