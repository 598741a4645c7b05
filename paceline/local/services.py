"""Runs the three services as child processes on this machine.

A child is `python -m MODULE --config FILE`, in a process group of its own, with
its log and its configuration in one folder. Nothing is announced before
grpc.health.v1 says SERVING. A child that ends once all serve is started again
on its port, a bounded number of times; after that, or before all serve, it is
named with what it refuses, or with the last lines of its log, and the others
are stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.client import Client
from paceline.local.restarts import Restarts
from paceline.local.service_process import (
    HEALTH_SECONDS,
    Flags,
    ServiceName,
    ServiceProcess,
    is_serving,
    write_config,
)
from paceline.local.settings import (
    ServeSettings,
    available_cores,
    check_settings,
    coordinator_flags,
    divide_cores,
    draft_flags,
    target_flags,
)
from paceline.protocol.errors import PacelineError
from paceline.runtime.config import Config, CoordinatorConfig, DraftConfig, TargetConfig
from paceline.runtime.process import describe_exit

POLL_SECONDS = 0.05
START_SECONDS = 600.0


class Services:
    """The services of `ServeSettings`, running while the context is open.

    Raises (on entering):
        InvalidInput: a setting out of its limits; nothing was started.
        ServiceRefused: a service has refused its model or a setting; the others were stopped.
        ServiceFailed: a service ended or did not come up in time; the others were stopped.
    """

    def __init__(
        self,
        settings: ServeSettings,
        folder: Path,
        announce: Callable[[str], None] = lambda line: None,
        *,
        start_timeout_s: float = START_SECONDS,
        keeps_logs: bool = True,
    ) -> None:
        check_settings(settings)
        self.settings = settings
        self.folder = folder
        self.processes: dict[ServiceName, ServiceProcess] = {}
        self._announce = announce
        self._start_timeout_s = start_timeout_s
        self._keeps_logs = keeps_logs
        self._configs: dict[ServiceName, tuple[type[Any], Flags]] = {}
        self._addresses: dict[ServiceName, str] = {}
        self._restarts: dict[ServiceName, Restarts] = {}
        self._returning: set[ServiceName] = set()

    @property
    def address(self) -> str:
        """The coordinator's host:port."""
        return self._address("coordinator")

    def __enter__(self) -> Services:
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._start_timeout_s
        try:
            self._start_workers()
            for process in list(self.processes.values()):
                self._await_serving(process, deadline)
            self._start_coordinator()
            self._await_serving(self.processes["coordinator"], deadline)
            self._await_links(deadline)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self) -> None:
        """Start again what ends, until a service has ended once too often.

        Raises:
            ServiceFailed: always, naming it.
        """
        while True:
            for process in self.processes.values():
                if process.exit_code is not None:
                    self._start_again(process, describe_exit(process.exit_code))
            self._announce_returned()
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Stop all, the coordinator first so that it closes its sessions; a second interrupt kills."""
        running = list(self.processes.values())
        try:
            for process in reversed(running):
                process.signal(signal.SIGTERM)
            for process in reversed(running):
                process.stop()
        finally:
            for process in running:
                process.kill()

    def _start_workers(self) -> None:
        drafts = self.settings.draft_model is not None
        cores = divide_cores(available_cores(os.environ), drafts=drafts)
        self._start("target", TargetConfig, target_flags(self.settings, cores.target), cores.target)
        if drafts:
            self._start("draft", DraftConfig, draft_flags(self.settings, cores.draft), cores.draft)

    def _start_coordinator(self) -> None:
        draft = self._address("draft") if "draft" in self.processes else None
        cores = available_cores(os.environ)
        flags = coordinator_flags(self.settings, self._address("target"), draft, cores)
        self._start("coordinator", CoordinatorConfig, flags, 1)

    def _start(self, name: ServiceName, kind: type[Config], flags: Flags, threads: int) -> None:
        process = ServiceProcess(name, self.folder, threads, keeps_log=self._keeps_logs)
        write_config(kind, process.config_file, flags)
        self._configs[name] = (kind, flags)
        self._restarts[name] = Restarts(self.settings.max_restarts)
        self.processes[name] = process
        process.start()

    def _start_again(self, process: ServiceProcess, ended: str) -> None:
        restarts = self._restarts[process.name]
        delay_s = restarts.next_delay_s(process.since_start_s)
        if delay_s is None:
            raise process.failure(f"ended with {ended}")
        which = f"restart {restarts.in_a_row} of {self.settings.max_restarts}"
        self._announce(f"{process.name:<12} ended with {ended}; {which} in {delay_s:g} s")
        time.sleep(delay_s)
        # The others know it by the port that it had.
        kind, flags = self._configs[process.name]
        port = int(self._addresses[process.name].rpartition(":")[2])
        write_config(kind, process.config_file, flags | {"server.port": port})
        process.start()
        self._returning.add(process.name)

    def _announce_returned(self) -> None:
        for name in tuple(self._returning):
            process = self.processes[name]
            if process.address is not None and is_serving(process.address):
                self._returning.discard(name)
                self._announce(f"{name:<12} {process.address}  pid {process.pid}  back")

    def _address(self, name: ServiceName) -> str:
        address = self.processes[name].address
        assert address is not None, f"{name} is serving"
        return address

    def _await_serving(self, process: ServiceProcess, deadline: float) -> None:
        while True:
            self._check_running()
            address = process.address
            if address is not None and is_serving(address):
                break
            self._wait_for_progress(process, "SERVING", deadline)
        self._addresses[process.name] = address
        self._announce(f"{process.name:<12} {address}  pid {process.pid}  {process.threads} threads")

    def _wait_for_progress(self, process: ServiceProcess, what: str, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise process.failure(f"is not {what} after {self._start_timeout_s:g} s")
        process.wait(POLL_SECONDS)

    def _await_links(self, deadline: float) -> None:
        """The coordinator serves before its links stand; the first request should find them."""
        with Client(self.address, timeout_s=HEALTH_SECONDS) as client:
            while True:
                self._check_running()
                with contextlib.suppress(PacelineError):
                    if all(
                        m.target_ready and (m.draft_ready or "draft" not in self.processes)
                        for m in client.describe_models()
                    ):
                        return
                self._wait_for_progress(self.processes["coordinator"], "linked to its peers", deadline)

    def _check_running(self) -> None:
        for process in self.processes.values():
            code = process.exit_code
            if code is not None:
                raise process.failure(f"ended with {describe_exit(code)}")
