"""One service as a child process: its configuration, log, port and end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.protocol.errors import InvalidInput, PacelineError
from paceline.rpc.channel import open_sync_channel
from paceline.runtime.config import (
    LOCALHOST,
    Config,
    CoordinatorConfig,
    DraftConfig,
    PeerSettings,
    TargetConfig,
    load_config,
)
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.options import of_program
from paceline.runtime.process import BAD_CONFIGURATION, SPIN_COUNT, find_refusal, reap
from paceline.runtime.settings import Settings
from paceline.runtime.sources import toml_value

LOG_LINES = 15
HEALTH_SECONDS = 1.0
STOP_SECONDS = 10.0
ServiceName = Literal["target", "draft", "coordinator"]
ProcessName = Literal[ServiceName, "gateway"]
"""The services, which speak gRPC, and what stands before them."""
PROGRAMS: Mapping[ProcessName, tuple[str, type[Settings]]] = {
    "target": ("target_service", TargetConfig),
    "draft": ("draft_service", DraftConfig),
    "coordinator": ("coordinator", CoordinatorConfig),
    "gateway": ("paceline_gateway", GatewayConfig),
}
"""The module that runs each, and what configures it."""


class ServiceFailed(PacelineError):
    """A service ended or did not start; the message has its refusal, or the last lines of its log."""


class ServiceRefused(ServiceFailed, InvalidInput):
    """A service refused its configuration; the message has the reason alone."""


Flags = dict[str, object]


def write_config(kind: type[Config], file: Path, flags: Flags) -> None:
    """Write the flags that are set as a TOML file of dotted keys, checked against `kind`."""
    load_config(kind, None, flags)
    file.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in flags.items() if value is not None))


def of_services(environment: Mapping[str, str]) -> list[str]:
    """Variables that configure services which somebody starts one by one."""
    return [name for _, kind in PROGRAMS.values() for name in of_program(environment, kind.variables)]


def inherited_environment() -> dict[str, str]:
    """This process's environment without variables of services, for a service that gets its whole configuration."""
    unread = of_services(os.environ)
    return {name: value for name, value in os.environ.items() if name not in unread}


@dataclass
class ServiceProcess:
    """One service as a child process, in a process group of its own.

    `start` may be called again after `stop` or `kill`; the log is appended to.

    Attributes:
        keeps_log: whether the user can read the folder after a failure.
        label: name of its files; the kind of service by default.
    """

    name: ProcessName
    folder: Path
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=inherited_environment)
    keeps_log: bool = True
    label: str = ""
    _log_start: int = field(default=0, init=False)
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _started_at: float = field(default=0.0, init=False)

    @property
    def log_file(self) -> Path:
        """The file of the child's stdout and stderr."""
        return self.folder / f"{self.label or self.name}.log"

    @property
    def config_file(self) -> Path:
        """The child's TOML configuration."""
        return self.folder / f"{self.label or self.name}.toml"

    @property
    def port_file(self) -> Path:
        """Written by the child with host:port once it is SERVING."""
        return self.folder / f"{self.label or self.name}.port"

    @property
    def pid(self) -> int:
        """The child's process id, which is its group's too."""
        assert self._child is not None, "started"
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """`None` while the child runs; negative: the signal that ended it."""
        return self.wait(0.0)

    @property
    def since_start_s(self) -> float:
        """Seconds since the last start of the child."""
        return time.monotonic() - self._started_at

    @property
    def address(self) -> str | None:
        """host:port to connect to, once the child has written it."""
        if not self.port_file.exists():
            return None
        host, _, port = self.port_file.read_text().strip().rpartition(":")
        return f"{LOCALHOST if host in ('0.0.0.0', '[::]', '::') else host}:{port}"  # noqa: S104 - compared, not bound

    def start(self) -> None:
        """Start the child; returns before it serves."""
        self._started_at = time.monotonic()
        self.port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", PROGRAMS[self.name][0], "--config", str(self.config_file)]
        command += ["--port-file", str(self.port_file), "--stop-with-stdin"]
        self._close_stdin()
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            # A group of its own: the terminal's Ctrl-C reaches the supervisor alone, which stops them in order.
            self._child = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                command,
                # The pipe closes when this process ends, however it ends, and the child ends with it.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment) | thread_environment(self.threads),
                process_group=0,
            )

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the child's end for at most `timeout_s`; returns its exit code, None if it runs or never ran."""
        return None if self._child is None else reap(self._child, timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child's whole group, if the child still runs."""
        if self._child is not None and self.exit_code is None:
            os.killpg(self._child.pid, number)

    def stop(self, grace_s: float = STOP_SECONDS) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when the child is gone."""
        if self._child is None:
            return
        self.signal(signal.SIGTERM)
        try:
            self.wait(grace_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL; returns when the child is gone."""
        if self._child is not None:
            self.signal(signal.SIGKILL)
            self.wait(math.inf)
            self._close_stdin()

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of the log."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open(errors="replace") as log:
            return "".join(deque(log, maxlen=lines)).rstrip()

    def failure(self, what: str) -> ServiceFailed:
        """The error that names this service, with its refusal or with the last lines of its log."""
        refusal = self._refusal()
        if refusal is None:
            return ServiceFailed(f"{self.name} service {what}; last lines of {self.log_file}:\n{self.log_tail()}")
        kind = ServiceRefused if self.exit_code == BAD_CONFIGURATION else ServiceFailed
        return kind(f"{refusal}\nlog: {self.log_file}" if self.keeps_log else refusal)

    def _close_stdin(self) -> None:
        """Close the pipe to a child that has ended."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()

    def _refusal(self) -> str | None:
        """The child's refusal since its last start."""
        if not self.log_file.exists():
            return None
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return find_refusal(line.decode(errors="replace") for line in log)


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables that a service needs before it loads torch."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def is_serving(peer: str | PeerSettings, timeout_s: float = HEALTH_SECONDS) -> bool:
    """Whether grpc.health.v1 of a peer, HOST:PORT or its settings, answers SERVING within `timeout_s`."""
    settings = PeerSettings(address=peer) if isinstance(peer, str) else peer
    with open_sync_channel(settings) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
