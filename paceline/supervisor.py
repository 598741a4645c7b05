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
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.client import Client
from paceline.config import (
    COORDINATOR_PORT,
    DEFAULT_MODEL,
    DRAFT_PORT,
    LOCALHOST,
    TARGET_PORT,
    Config,
    CoordinatorConfig,
    DraftConfig,
    TargetConfig,
    load_config,
)
from paceline.drafter_choice import MODEL, DrafterChoice
from paceline.errors import InvalidInput, PacelineError
from paceline.process import BAD_CONFIGURATION, describe_exit, find_refusal
from paceline.restarts import Restarts
from paceline.types import AUTO, NGRAM, NONE, require

LOG_LINES = 15
POLL_SECONDS = 0.05
HEALTH_SECONDS = 1.0
STOP_SECONDS = 10.0
START_SECONDS = 600.0
MAX_RESTARTS = 1000
SPIN_COUNT = 20_000
SHARED_BELOW = 4
"""Cores from which target and draft get cores of their own."""
"""Turns that an OpenMP thread waits before it sleeps, about 0.1 ms."""

ServiceName = Literal["target", "draft", "coordinator"]
_MODULES: Mapping[ServiceName, str] = {
    "target": "target_service",
    "draft": "draft_service",
    "coordinator": "coordinator",
}


class ServiceFailed(PacelineError):
    """A service ended, or never came up; the message has its refusal, or the last lines of its log."""


class ServiceRefused(ServiceFailed, InvalidInput):
    """A service has refused what it was configured with; the message has the reason alone."""


@dataclass(frozen=True)
class ServeSettings:
    """What `paceline serve` runs. `None` and 0 leave a choice to the service; port 0 takes a free one."""

    model: str = DEFAULT_MODEL
    drafter: str = AUTO
    num_draft_tokens: int | None = None
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    dtype: str | None = None
    reproducible: bool | None = None
    trust_remote_code: bool | None = None
    served_model_name: str | None = None
    seed: int | None = None
    host: str = LOCALHOST
    port: int = COORDINATOR_PORT
    draft_port: int = DRAFT_PORT
    target_port: int = TARGET_PORT
    max_restarts: int = 5

    def __post_init__(self) -> None:
        require(0 <= self.max_restarts <= MAX_RESTARTS, "max_restarts", self.max_restarts, f"in [0, {MAX_RESTARTS}]")
        DrafterChoice.parse(self.drafter)

    @property
    def draft_model(self) -> str | None:
        """What the draft service loads; None: there is no draft service."""
        return DrafterChoice.parse(self.drafter).draft_model(self.model)


@dataclass(frozen=True)
class Cores:
    """Compute threads of the two services that compute."""

    target: int
    draft: int


def divide_cores(total: int, *, drafts: bool) -> Cores:
    """Divide `total` cores: a drafting model gets a quarter, a target without one keeps them all.

    Below four cores a quarter isn't worth what the target would lose: the target uses them all, and the draft
    one of them while it waits (`coordinator_flags`). A draft's step is too short to gain from a second thread,
    which would have to be woken, and the coordinator has work meanwhile.
    """
    if not drafts:
        return Cores(target=total, draft=total)
    if total < SHARED_BELOW:
        return Cores(target=total, draft=1)
    return Cores(target=total - total // 4, draft=total // 4)


def available_cores(environment: Mapping[str, str]) -> int:
    """Cores that this process may use, or fewer if OMP_NUM_THREADS says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = environment.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) > 0 else cores


def speculative_drafter(text: str) -> tuple[str, int | None]:
    """Read vLLM's `--speculative-config` JSON.

    Returns:
        The drafter as `--drafter` names it, and the tokens to propose if given.

    Raises:
        InvalidInput: not a JSON object, an unknown key or method, a model missing or out of place.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput.of("speculative_config", text, f"JSON ({error})") from error
    require(isinstance(given, dict), "speculative_config", text, "a JSON object")
    known = ("method", "model", "num_speculative_tokens")
    for key, value in given.items():
        require(key in known, f"speculative_config.{key}", value, f"left out; known keys: {', '.join(known)}")
    tokens = given.get("num_speculative_tokens")
    tokens_ok = tokens is None or type(tokens) is int
    require(tokens_ok, "speculative_config.num_speculative_tokens", tokens, "an integer")
    return _method_drafter(given.get("method"), given.get("model")), tokens


def _method_drafter(method: object, model: object) -> str:
    methods = (AUTO, NGRAM, "draft_model", NONE)
    require(method in methods, "speculative_config.method", method, f"one of {', '.join(methods)}")
    if method == "draft_model":
        given = isinstance(model, str) and model != ""
        require(given, "speculative_config.model", model, "the drafting model's name or path")
        return f"model:{model}"
    require(model is None, "speculative_config.model", model, f"left out with method {method}")
    return str(method)


Flags = dict[str, object]


def target_flags(settings: ServeSettings, threads: int) -> Flags:
    """The target service's settings, dotted keys as in `TargetConfig`."""
    return _engine_flags(settings, threads) | {
        "model": settings.model,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "engine.reproducible": settings.reproducible,
        "server.port": settings.target_port,
    }


def draft_flags(settings: ServeSettings, threads: int) -> Flags:
    """The draft service's settings, dotted keys as in `DraftConfig`; its precision is its own affair."""
    return _engine_flags(settings, threads) | {
        "engine.dtype": None,
        "drafters": [f"{MODEL}:{settings.draft_model}"],
        "target_model": settings.model,
        "server.port": settings.draft_port,
    }


def coordinator_flags(settings: ServeSettings, target: str, draft: str | None, cores: int) -> Flags:
    """The coordinator's settings, dotted keys as in `CoordinatorConfig`."""
    return {
        "model": settings.model,
        "served_model_name": settings.served_model_name,
        "drafter": DrafterChoice.parse(settings.drafter).kind,
        "num_draft_tokens": settings.num_draft_tokens,
        # Drafting beside a target on the same cores takes from it more than it gives.
        "fan_out": 0 if cores < SHARED_BELOW else None,
        "seed": settings.seed,
        "server.host": settings.host,
        "server.port": settings.port,
        "target.address": target,
        "draft.address": draft,
    }


def _engine_flags(settings: ServeSettings, threads: int) -> Flags:
    return {
        "engine.threads": threads,
        "engine.max_model_len": settings.max_model_len,
        "engine.max_num_seqs": settings.max_num_seqs,
        "engine.gpu_memory_utilization": settings.gpu_memory_utilization,
        "engine.dtype": settings.dtype,
        "engine.trust_remote_code": settings.trust_remote_code,
    }


def check_settings(settings: ServeSettings) -> None:
    """Validate every service's configuration before a process starts.

    Raises:
        InvalidInput: naming key, value and limit.
    """
    load_config(TargetConfig, None, target_flags(settings, 1))
    if settings.draft_model is not None:
        load_config(DraftConfig, None, draft_flags(settings, 1))
    load_config(CoordinatorConfig, None, coordinator_flags(settings, "checked:1", None, 1))


def write_config(kind: type[Config], file: Path, flags: Flags) -> None:
    """Write the flags that are set as a TOML file of dotted keys, checked against `kind`."""
    load_config(kind, None, flags)
    given = {key: value for key, value in flags.items() if value is not None}
    file.write_text("".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in given.items()))


@dataclass
class ServiceProcess:
    """One service as a child process, in a process group of its own.

    `start` may be called again after `stop` or `kill`; the log is appended to.
    `keeps_log`: whether the folder is there for the user to read, after a failure.
    """

    name: ServiceName
    folder: Path
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    keeps_log: bool = True
    _log_start: int = field(default=0, init=False)
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _started: float = field(default=0.0, init=False)

    @property
    def log_file(self) -> Path:
        """Where the child's stdout and stderr go."""
        return self.folder / f"{self.name}.log"

    @property
    def config_file(self) -> Path:
        """The child's TOML configuration."""
        return self.folder / f"{self.name}.toml"

    @property
    def port_file(self) -> Path:
        """Written by the child with host:port once it is SERVING."""
        return self.folder / f"{self.name}.port"

    @property
    def pid(self) -> int:
        """The child's process id, which is its group's too."""
        assert self._child is not None, "started"
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """`None` while the child runs; negative: the signal that ended it."""
        return None if self._child is None else self._child.poll()

    @property
    def since_start_s(self) -> float:
        """Seconds since the child was started last."""
        return time.monotonic() - self._started

    @property
    def address(self) -> str | None:
        """host:port to connect to, once the child has written it."""
        if not self.port_file.exists():
            return None
        host, _, port = self.port_file.read_text().strip().rpartition(":")
        return f"{LOCALHOST if host in ('0.0.0.0', '[::]', '::') else host}:{port}"  # noqa: S104 - compared, not bound

    def start(self) -> None:
        """Start the child; returns before it serves."""
        self._started = time.monotonic()
        self.port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", _MODULES[self.name], "--config", str(self.config_file)]
        command += ["--port-file", str(self.port_file)]
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            # A group of its own: the terminal's Ctrl-C reaches the supervisor alone, which stops them in order.
            self._child = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment) | _thread_environment(self.threads),
                process_group=0,
            )

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the child to end, for at most `timeout_s`; returns its exit code if it has."""
        assert self._child is not None, "started"
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child's whole group, if the child still runs."""
        if self._child is not None and self._child.poll() is None:
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
            self._child.wait()

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of the log."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open(errors="replace") as log:
            return "".join(deque(log, maxlen=lines)).rstrip()

    def failure(self, what: str) -> ServiceFailed:
        """The error that names this service, with what it refused, or with the last lines of its log."""
        refusal = self._refusal()
        if refusal is None:
            return ServiceFailed(f"{self.name} service {what}; last lines of {self.log_file}:\n{self.log_tail()}")
        kind = ServiceRefused if self.exit_code == BAD_CONFIGURATION else ServiceFailed
        return kind(f"{refusal}\nlog: {self.log_file}" if self.keeps_log else refusal)

    def _refusal(self) -> str | None:
        """What the child refused since it was started last."""
        if not self.log_file.exists():
            return None
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return find_refusal(line.decode(errors="replace") for line in log)


def _thread_environment(threads: int) -> dict[str, str]:
    # A waiting thread spins across the microseconds between two layers, then sleeps: one that sleeps at once
    # makes each layer wait for its wake-up, one that spins for good takes the cores of the other services.
    return {
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def is_serving(address: str, timeout_s: float = HEALTH_SECONDS) -> bool:
    """Whether grpc.health.v1 at `address` (plaintext) answers SERVING within `timeout_s`."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


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
