"""Services on timed table models, in processes of their own, and what is asked of them.

A timed model waits where a real one computes, so the times are those that the
benchmark states and two cores serve every process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil

from paceline.client import Client
from paceline.local.service_process import Flags, ServiceName, ServiceProcess, write_config
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.handshake import ServiceStatus
from paceline.protocol.records import RoundRecord
from paceline.rpc.service_status import service_status
from paceline.runtime.config import Config, CoordinatorConfig, DraftConfig, TargetConfig

START_SECONDS = 120.0
POLL_SECONDS = 0.05
MODEL_DRAFTER = "model"
OFF = SpeculationSettings(off=True)


class ModelPair(Protocol):
    """Names of a target's and a draft's models."""

    @property
    def target(self) -> str:
        """The target's."""

    @property
    def draft(self) -> str:
        """The draft's."""


@dataclass(frozen=True)
class SimulatedPair:
    """A target and a draft of it: named distributions with stated times, milliseconds."""

    draft_distribution: str
    verify_ms: float
    draft_ms: float
    target_row_ms: float = 0.0
    draft_row_ms: float = 0.0

    @property
    def target(self) -> str:
        """The target's model name."""
        return _model_name("distribution=text", self.verify_ms, self.target_row_ms)

    @property
    def draft(self) -> str:
        """The draft's model name."""
        return _model_name(self.draft_distribution, self.draft_ms, self.draft_row_ms)


def _model_name(distribution: str, step_ms: float, row_ms: float) -> str:
    return f"table:{distribution},step_ms={step_ms:g},row_ms={row_ms:g}"


class SimulatedServices:
    """A target and a draft service; coordinators come and go beside them. A context manager.

    Raises (on entering, and from `coordinator`):
        ServiceFailed: a service ended or did not come up, with the last lines of its log.
    """

    def __init__(self, folder: Path, pair: ModelPair) -> None:
        self.pair = pair
        self._folder = folder
        self._processes: dict[str, ServiceProcess] = {}

    def __enter__(self) -> SimulatedServices:
        try:
            target: Flags = {"model": self.pair.target, "server.port": 0}
            draft: Flags = {"drafters": [f"model:{self.pair.draft}"], "server.port": 0}
            self._start("target", "target", TargetConfig, target)
            self._start("draft", "draft", DraftConfig, draft)
            for label in ("target", "draft"):
                self._await_serving(label)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop every process."""
        for process in reversed([*self._processes.values()]):
            process.stop()

    @contextmanager
    def coordinator(self, label: str, flags: Flags) -> Iterator[str]:
        """A coordinator linked to both services, with settings of its own; yields its address."""
        self._start(label, "coordinator", CoordinatorConfig, self.coordinator_flags() | flags)
        try:
            self._await_serving(label)
            address = self.address(label)
            self._await_links(label, address)
            yield address
        finally:
            self._processes.pop(label).stop()

    def coordinator_flags(self) -> Flags:
        """What any coordinator beside these services is configured with."""
        return {
            "model": self.pair.target,
            "server.port": 0,
            "target.address": self.address("target"),
            "draft.address": self.address("draft"),
        }

    def address(self, label: str) -> str:
        """host:port of a serving process."""
        address = self._processes[label].address
        assert address is not None, f"{label} is serving"
        return address

    def cpu_seconds(self, label: str) -> float:
        """CPU time of a process so far."""
        times = psutil.Process(self._processes[label].pid).cpu_times()
        return float(times.user + times.system)

    def status(self, label: ServiceName) -> ServiceStatus:
        """What the target or the draft service has done."""
        return service_status(label, self.address(label))

    def _start(self, label: str, name: ServiceName, kind: type[Config], flags: Flags) -> None:
        folder = self._folder / label
        folder.mkdir(parents=True, exist_ok=True)
        process = ServiceProcess(name, folder, environment=dict(os.environ))
        write_config(kind, process.config_file, flags)
        self._processes[label] = process
        process.start()

    def _await_serving(self, label: str) -> None:
        process = self._processes[label]
        deadline = time.monotonic() + START_SECONDS
        while process.address is None:
            self._wait(process, "SERVING", deadline)

    def _await_links(self, label: str, address: str) -> None:
        process = self._processes[label]
        deadline = time.monotonic() + START_SECONDS
        with Client(address, timeout_s=1.0) as client:
            while True:
                with suppress(PacelineError):
                    if all(model.target_ready and model.draft_ready for model in client.describe_models()):
                        return
                self._wait(process, "linked to its peers", deadline)

    def _wait(self, process: ServiceProcess, what: str, deadline: float) -> None:
        code = process.wait(POLL_SECONDS)
        if code is not None:
            raise process.failure(f"ended with {code}")
        if time.monotonic() > deadline:
            raise process.failure(f"is not {what} after {START_SECONDS:g} s")


def request(number: int, tokens: int, speculation: SpeculationSettings) -> GenerateRequest:
    """One of the benchmark's requests: prompt and seed from its number, and text that ends only at `tokens`."""
    prompt = tuple((37 * number + 11 * place) % 256 for place in range(8))
    return GenerateRequest(
        token_ids=prompt, seed=number, max_new_tokens=tokens, ignore_eos=True, speculation=speculation
    )


def drafted(k: int | None) -> SpeculationSettings:
    """The model drafter with k tokens a round; None: the policy chooses drafter and k."""
    return SpeculationSettings() if k is None else SpeculationSettings(drafter=MODEL_DRAFTER, num_draft_tokens=k)


def is_hit(record: RoundRecord) -> bool:
    """Whether a token that was drafted for the round's outcome was there when the verdict was."""
    return record.cache_hit and record.proposed > 0
