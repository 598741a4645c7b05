"""Three real services in processes of their own, and the means to hurt them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.client import AsyncClient, Client
from paceline.local.service_process import Flags, ServiceName, ServiceProcess, write_config
from paceline.protocol.handshake import ServiceStatus
from paceline.rpc.service_status import service_status
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig

START_SECONDS = 60.0
POLL_SECONDS = 0.01
TARGET = "table:vocab=64,seed=1"
NEAR = "table:vocab=64,seed=1,noise=0.3"
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until a condition holds; fail naming it."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_SECONDS)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Cluster:
    """A target, a draft service (unless `drafters` is empty) and a coordinator; a context manager."""

    folder: Path
    target_model: str = TARGET
    drafters: tuple[str, ...] = (f"model:{NEAR}",)
    target_flags: Flags = field(default_factory=dict)
    draft_flags: Flags = field(default_factory=dict)
    coordinator_flags: Flags = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    target_proxy: str | None = None
    """host:port that the coordinator dials instead of the target's own."""

    def __post_init__(self) -> None:
        self.ports: dict[ServiceName, int] = {
            "target": free_port(), "draft": free_port(), "coordinator": free_port()
        }  # fmt: skip
        self.services: dict[ServiceName, ServiceProcess] = {}

    def __enter__(self) -> Cluster:
        self._write_configs()
        names: tuple[ServiceName, ...] = (
            ("target", "draft", "coordinator") if self.drafters else ("target", "coordinator")
        )
        for name in names:
            service = ServiceProcess(name, self.folder)
            service.environment = dict(service.environment) | ENVIRONMENT | dict(self.environment)
            self.services[name] = service
            service.start()
        try:
            for name in names:
                self.wait_serving(name)
            self.wait_linked()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for service in reversed(list(self.services.values())):
            service.stop()

    def kill(self, name: ServiceName) -> None:
        self.services[name].kill()

    def restart(self, name: ServiceName) -> None:
        self.services[name].start()
        self.wait_serving(name)

    def rewrite(self, name: ServiceName) -> None:
        """Write a service's configuration again, for its next start."""
        write_config(*self._configs()[name])

    def wait_serving(self, name: ServiceName) -> None:
        service = self.services[name]

        def serving() -> bool:
            if service.exit_code is not None:
                raise service.failure(f"ended with {service.exit_code}")
            return service.address is not None

        eventually(serving, f"{name} serves", START_SECONDS)

    def wait_linked(self, *, target: bool = True, draft: bool = True) -> None:
        """Wait until the coordinator has its links."""

        def linked() -> bool:
            with self.client() as client:
                (model,) = client.describe_models()
            return (model.target_ready or not target) and (model.draft_ready or not draft or not self.drafters)

        eventually(linked, "the coordinator has its links")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['coordinator']}"

    def client(self, **options: float) -> Client:
        return Client(self.address, **options)

    def async_client(self, **options: float) -> AsyncClient:
        return AsyncClient(self.address, **options)

    def status(self, name: ServiceName) -> ServiceStatus:
        """What the target or the draft service is doing."""
        return service_status(name, f"127.0.0.1:{self.ports[name]}")

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Wait until no service holds a session or a KV row."""
        for name in self.services:
            if name != "coordinator":
                eventually(partial(self._idle, name), f"{name} holds nothing", timeout_s)

    def _idle(self, name: ServiceName) -> bool:
        status = self.status(name)
        return status.sessions == 0 and status.kv_rows == 0

    def _write_configs(self) -> None:
        for kind, file, flags in self._configs().values():
            write_config(kind, file, flags)

    def _configs(self) -> dict[ServiceName, tuple[type[Any], Path, Flags]]:
        target: Flags = {"model": self.target_model, "server.port": self.ports["target"]}
        draft: Flags = {"drafters": list(self.drafters), "server.port": self.ports["draft"]}
        coordinator: Flags = {
            "model": self.target_model,
            "server.port": self.ports["coordinator"],
            "target.address": self.target_proxy or f"127.0.0.1:{self.ports['target']}",
            "reconnect_max_ms": 200.0,
        }
        if self.drafters:
            coordinator["draft.address"] = f"127.0.0.1:{self.ports['draft']}"
        made: dict[ServiceName, tuple[type[Any], Flags]] = {
            "target": (TargetConfig, target | self.target_flags),
            "coordinator": (CoordinatorConfig, coordinator | self.coordinator_flags),
        }
        if self.drafters:
            made["draft"] = (DraftConfig, draft | self.draft_flags)
        return {
            name: (kind, ServiceProcess(name, self.folder).config_file, flags) for name, (kind, flags) in made.items()
        }


@contextmanager
def second_coordinator(cluster: Cluster, folder: Path, flags: Flags) -> Iterator[str]:
    """A coordinator with settings of its own on a cluster's target and draft; yields its address."""
    second = ServiceProcess("coordinator", folder)
    second.environment = dict(second.environment) | ENVIRONMENT
    beside: Flags = {
        "model": cluster.target_model,
        "server.port": 0,
        "target.address": f"127.0.0.1:{cluster.ports['target']}",
        "draft.address": f"127.0.0.1:{cluster.ports['draft']}",
    }
    write_config(CoordinatorConfig, second.config_file, beside | flags)
    second.start()
    try:
        eventually(lambda: second.address is not None, "the second coordinator serves", 60)
        assert second.address is not None
        yield second.address
    finally:
        second.stop()
