"""The services of `paceline serve`: a target, a coordinator, a draft service if the drafter needs one, a gateway.

A service is announced once grpc.health.v1 says SERVING. A service that ends after all serve is started again on its
port, a bounded number of times. After that, or if it ends before all serve, the error names it with its refusal or
the last lines of its log, and the others are stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.local.service_process import STOP_SECONDS, ServiceFailed, ServiceProcess, ServiceRefused
from paceline.local.services import POLL_SECONDS, START_SECONDS, LocalServices
from paceline.local.settings import (
    Cores,
    ServeSettings,
    available_cores,
    by_rule,
    check_settings,
    coordinator_flags,
    draft_flags,
    gateway_flags,
    gpu_shares,
    missing_packages,
    target_flags,
)
from paceline.runtime.process import describe_exit

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""A service that ran for so long has recovered: its earlier restarts no longer count."""


class Restarts:
    """The restarts of one service: at most `limit` in a row, each after twice the previous delay."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_a_row = 0

    def next_delay_s(self, ran_s: float) -> float | None:
        """Count a restart of a service that ran for `ran_s`; returns the delay before it, or None at the limit."""
        if ran_s >= STEADY_S:
            self.in_a_row = 0
        if self.in_a_row >= self._limit:
            return None
        self.in_a_row += 1
        return min(FIRST_DELAY_S * 2.0 ** (self.in_a_row - 1), LONGEST_DELAY_S)


class SupervisedServices(LocalServices):
    """The services of `ServeSettings`, with the machine's cores divided among them; otherwise as `LocalServices`.

    Args:
        environment: variables of all services, beside this process's.
        coordinator: further settings of the coordinator, dotted keys as in `CoordinatorConfig`.
        opens_http: whether a gateway stands in front of the coordinator.

    Raises (when made):
        InvalidInput: a setting out of its limits.
    """

    def __init__(
        self,
        settings: ServeSettings,
        folder: Path,
        announce: Callable[[str], None] = lambda line: None,
        *,
        environment: Mapping[str, str] | None = None,
        coordinator: Mapping[str, object] | None = None,
        start_timeout_s: float = START_SECONDS,
        keeps_logs: bool = True,
        opens_http: bool = False,
    ) -> None:
        check_settings(settings)
        super().__init__(
            folder,
            announce,
            environment=environment,
            start_timeout_s=start_timeout_s,
            stop_timeout_s=settings.drain_seconds + STOP_SECONDS,
            keeps_logs=keeps_logs,
            tls=settings.tls,
        )
        self.settings = settings
        self._coordinator = dict(coordinator or {})
        self._opens_http = opens_http
        self._restarts: dict[str, Restarts] = {}
        self._returning: set[str] = set()

    def start_all(self) -> None:
        """Start target and draft, then the coordinator, and wait for its links."""
        cores = self._divide()
        drafts = bool(self.settings.draft_models)
        if (missing := self.settings.missing_draft) is not None:
            self._announce(f"drafting from n-grams alone: {missing}")
        target_share, draft_share = gpu_shares(self.settings)
        self.start("target", "target", target_flags(self.settings, cores.target) | target_share, cores.target)
        if drafts:
            self.start("draft", "draft", draft_flags(self.settings, cores.draft) | draft_share, cores.draft)
        self.await_serving(*self.processes)
        draft = self.address_of("draft") if drafts else None
        flags = coordinator_flags(self.settings, self.address_of("target"), draft) | self._coordinator
        self.start("coordinator", "coordinator", flags)
        self.await_serving("coordinator")
        self.await_links()
        if self._opens_http:
            self._open_http()
        self._restarts = {label: Restarts(self.settings.max_restarts) for label in self.processes}

    @property
    def http_address(self) -> str | None:
        """The gateway's host:port; None: there is no gateway."""
        return self.address_of("gateway") if "gateway" in self.processes else None

    def _open_http(self) -> None:
        """Start the gateway. If it fails, the services run without it, unless a flag asks for HTTP."""
        try:
            if missing := missing_packages():
                raise ServiceRefused(f"HTTP needs {', '.join(missing)}: pip install 'paceline[http]'")
            self.start("gateway", "gateway", gateway_flags(self.settings, self.address))
            self.await_serving("gateway")
        except ServiceFailed as error:
            if self.settings.insists_on_http:
                raise
            if (process := self.processes.pop("gateway", None)) is not None:
                process.kill()
            self._announce(f"{'gateway':<12} no HTTP: {error.message.splitlines()[0]}")

    def _divide(self) -> Cores:
        """The division of the cores, by the setting or by the rule; announced if there is a draft."""
        total, setting = available_cores(os.environ), self.settings.cores
        cores = Cores.parse(setting) if setting else by_rule(total, drafts=bool(self.settings.draft_models))
        if setting or cores.draft:
            source = ": as the setting cores says" if setting else ""
            self._announce(f"{'cores':<12} {cores.description(total)}{source}")
        return cores

    def wait(self) -> None:
        """Restart services that end, until one has used up its restarts.

        Raises:
            ServiceFailed: always, naming that service.
        """
        while True:
            for label, process in self.processes.items():
                if process.exit_code is not None:
                    self._restart(label, process)
            self._announce_returned()
            time.sleep(POLL_SECONDS)

    def _restart(self, label: str, process: ServiceProcess) -> None:
        restarts, exit_text = self._restarts[label], describe_exit(process.exit_code)
        delay_s = restarts.next_delay_s(process.since_start_s)
        if delay_s is None:
            raise process.failure(f"ended with {exit_text}")
        which = f"restart {restarts.in_a_row} of {self.settings.max_restarts}"
        self._announce(f"{label:<12} ended with {exit_text}; {which} in {delay_s:g} s")
        time.sleep(delay_s)
        self.start_again(label)
        self._returning.add(label)

    def _announce_returned(self) -> None:
        for label in tuple(self._returning):
            process = self.processes[label]
            if self.serves(label):
                self._returning.discard(label)
                self._announce(f"{label:<12} {process.address}  pid {process.pid}  back")
