"""Services as child processes on this machine, for `serve`, `generate --local`, benchmarks and tests.

A child is `python -m MODULE --config FILE`, in a process group of its own, with its log and its configuration in one
folder, each named after the child's label.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.client import Client
from paceline.local.service_process import (
    HEALTH_SECONDS,
    PROGRAMS,
    STOP_SECONDS,
    Flags,
    ProcessName,
    ServiceProcess,
    inherited_environment,
    is_serving,
    write_config,
)
from paceline.local.tls import operator_of, peer_tls, server_tls
from paceline.protocol.errors import PacelineError
from paceline.protocol.handshake import ServiceStatus
from paceline.rpc.link_kinds import service_status
from paceline.runtime.config import PeerSettings
from paceline.runtime.process import describe_exit
from paceline.runtime.roles import PeerRole

POLL_SECONDS = 0.05
START_SECONDS = 600.0


class LocalServices:
    """Labelled services that run while the context is open. Subclasses start theirs in `start_all`.

    Other services find those with the labels `target`, `draft` and `coordinator` by default.

    Raises (on entering, from `await_serving`, `await_links` and all that start a service):
        InvalidInput: a setting out of its limits; this service was not started.
        ServiceRefused: a service has refused its model or a setting.
        ServiceFailed: a service ended or did not start in time.

    After an error on entering, all started services are stopped.

    Args:
        tls: the folder of role certificates for mutual TLS between all services; None: plaintext.
    """

    def __init__(
        self,
        folder: Path,
        announce: Callable[[str], None] = lambda line: None,
        *,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = START_SECONDS,
        stop_timeout_s: float = STOP_SECONDS,
        keeps_logs: bool = True,
        tls: Path | None = None,
    ) -> None:
        self.folder = folder
        self.tls = tls
        self.processes: dict[str, ServiceProcess] = {}
        self._announce = announce
        self._environment = dict(environment or {})
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._keeps_logs = keeps_logs
        self._flags: dict[str, Flags] = {}
        self._killed_labels: set[str] = set()
        self.api_key: str | None = None
        """For coordinators that need a key, to see their links."""

    def start_all(self) -> None:
        """Start the services that run from the beginning."""

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, label: str, name: ProcessName, flags: Flags, threads: int = 1) -> None:
        """Start a service with its own settings; returns before it serves. A label may be started again."""
        process = self.processes.get(label)
        if process is None:
            environment = inherited_environment() | self._environment
            process = ServiceProcess(name, self.folder, threads, environment, self._keeps_logs, label)
        write_config(PROGRAMS[name][1], process.config_file, flags)
        self.processes[label] = process
        self._flags[label] = flags
        self._killed_labels.discard(label)
        process.start()

    def start_again(self, label: str) -> None:
        """Start a service that has ended with its old settings, on its old port, by which the others know it."""
        process = self.processes[label]
        self.start(label, process.name, self._flags[label], process.threads)

    def await_serving(self, *labels: str) -> None:
        """Wait until services are SERVING."""
        deadline = time.monotonic() + self._start_timeout_s
        for label in labels:
            process = self.processes[label]
            while not self.serves(label):
                self._wait_for_progress(process, "SERVING", deadline)
            address = self.address_of(label)
            port = int(address.rpartition(":")[2])
            self._flags[label] = self._flags[label] | {"server.port": port}
            self._announce(f"{label:<12} {address}  pid {process.pid}  {process.threads} threads")

    def serves(self, label: str) -> bool:
        """Whether a service is SERVING; of a gateway, which has no gRPC, whether it has begun to serve."""
        process = self.processes[label]
        return process.address is not None and (process.name == "gateway" or is_serving(self.reach(label)))

    def await_links(self, label: str = "coordinator") -> None:
        """Wait until a coordinator has its links: it serves before that, but the first request needs them."""
        deadline = time.monotonic() + self._start_timeout_s
        drafts = "draft" in self.processes
        with Client(self.reach(label), timeout_s=HEALTH_SECONDS, api_key=self.api_key) as client:
            while True:
                with contextlib.suppress(PacelineError):
                    if all(m.target_ready and (m.draft_ready or not drafts) for m in client.describe_models()):
                        return
                self._wait_for_progress(self.processes[label], "linked to its peers", deadline)

    @contextlib.contextmanager
    def coordinator(self, label: str, flags: Flags) -> Iterator[str]:
        """Run another coordinator of the target and the draft while the context is open; yields its address."""
        self.start(label, "coordinator", self.coordinator_flags() | flags)
        try:
            self.await_serving(label)
            self.await_links(label)
            yield self.address_of(label)
        finally:
            self.processes.pop(label).stop()

    def coordinator_flags(self) -> Flags:
        """The settings that every coordinator of the target and the draft has."""
        draft = self.address_of("draft") if "draft" in self.processes else None
        return {
            "model": self._flags["target"]["model"],
            "server.port": 0,
            "target.address": self.address_of("target"),
            "draft.address": draft,
            **server_tls(self.tls, PeerRole.COORDINATOR),
            **peer_tls(self.tls),
        }

    def reach(self, label: str) -> PeerSettings:
        """The operator's connection to a service that serves or has served."""
        return operator_of(self.tls, self.address_of(label), PeerRole(self.processes[label].name))

    @property
    def address(self) -> str:
        """The coordinator's host:port."""
        return self.address_of("coordinator")

    def address_of(self, label: str) -> str:
        """host:port of a service that serves or has served."""
        address = self.processes[label].address
        assert address is not None, f"{label} is serving"
        return address

    def status(self, label: str) -> ServiceStatus:
        """The status of a target or draft service."""
        return service_status(self.processes[label].name, self.reach(label))

    def kill(self, label: str) -> None:
        """SIGKILL a service; waits for other services don't count it as a failure."""
        self._killed_labels.add(label)
        self.processes[label].kill()

    def stop(self) -> None:
        """Stop all, gateways and coordinators first, since their requests need the others. An interrupt kills."""
        names: tuple[tuple[ProcessName, ...], ...] = (("gateway",), ("coordinator",), ("target", "draft"))
        try:
            for roles in names:
                group = [process for process in self.processes.values() if process.name in roles]
                for process in group:
                    process.signal(signal.SIGTERM)
                for process in group:
                    process.wait(self._stop_timeout_s)
        finally:
            for process in self.processes.values():
                process.kill()

    def _wait_for_progress(self, process: ServiceProcess, what: str, deadline: float) -> None:
        for label, each in self.processes.items():
            if each.exit_code is not None and label not in self._killed_labels:
                raise each.failure(f"ended with {describe_exit(each.exit_code)}")
        if time.monotonic() > deadline:
            raise process.failure(f"is not {what} after {self._start_timeout_s:g} s")
        process.wait(POLL_SECONDS)
