"""Services under measurement: a group is what one `paceline serve --drafter X` runs.

All groups are up at once and one is busy at a time; an idle one waits without spinning.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
from rich.console import Console

from paceline.client import Client, Generation
from paceline.local.settings import local_settings
from paceline.local.supervisor import SupervisedServices
from paceline.models.resolve import resolve
from paceline.protocol.errors import require
from paceline.protocol.generation import GenerateRequest
from paceline.runtime.config import NOT_QUANTIZED

WARM_UP_TOKENS = 24


class GenerationRunner(Protocol):
    """Something that generates, one request at a time."""

    @property
    def name(self) -> str:
        """Its drafter, as `paceline serve` takes it."""

    @property
    def target_threads(self) -> int:
        """Compute threads of its target; 0: unknown."""

    @property
    def processes(self) -> Sequence[int]:
        """Process ids of its services; empty: unknown."""

    def generate(self, request: GenerateRequest) -> Generation:
        """Run one generation to its end. Raises PacelineError as `Client.generate` does."""


@dataclass(frozen=True)
class ServiceGroup:
    """A running coordinator, and facts of the processes behind it; `start_s`: how long they took to start."""

    name: str
    client: Client
    target_threads: int = 0
    draft_threads: int = 0
    processes: Sequence[int] = ()
    start_s: float = 0.0

    def generate(self, request: GenerateRequest) -> Generation:
        """Generate as `Client.generate` does."""
        return self.client.generate(request)

    @property
    def split(self) -> str:
        """Return the thread split in words."""
        draft = f", draft {self.draft_threads}" if self.draft_threads else ""
        return f"target {self.target_threads}{draft}" if self.target_threads else "unknown"


@dataclass(frozen=True)
class MeasuredServices:
    """Services to measure: started for the purpose, or running at `url`.

    Attributes:
        quantization: quantization of the target, as `paceline serve` takes it; empty: the option was left out.
        options: further settings of `paceline serve`, by their names.
        environment: variables of the services, beside ours.
    """

    model: str
    url: str | None = None
    quantization: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        conflict = self.quantization and self.url
        require(not conflict, "quantization", self.quantization, "left out with --url, whose services are running")


@contextmanager
def running_groups(
    services: MeasuredServices, drafters: Sequence[str], console: Console
) -> Iterator[dict[str, ServiceGroup]]:
    """Yield services for each drafter, started here or at the address; `none` is our fastest target-only."""
    if services.url is not None:
        with connect(services.url, drafters) as groups:
            yield groups
        return
    resolve(services.model)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        start_groups(services, drafters, Path(folder), lambda line: console.print(line, style="dim")) as groups,
    ):
        yield groups


@contextmanager
def start_groups(
    services: MeasuredServices,
    drafters: Sequence[str],
    folder: Path,
    announce: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, ServiceGroup]]:
    """Run a group for each drafter, and stop them at the end.

    Raises:
        InvalidInput: a model or drafter that `paceline serve` would refuse.
        ServiceFailed: services that did not come up; the others were stopped.
    """
    with ExitStack() as stack:
        groups = {}
        for number, drafter in enumerate(dict.fromkeys(drafters)):
            announce(f"starting services for {drafter}")
            quantization = services.quantization or NOT_QUANTIZED
            settings = local_settings(services.model, drafter, quantization, **services.options)
            made, environment = folder / str(number), services.environment
            began_s = time.perf_counter()
            running = stack.enter_context(SupervisedServices(settings, made, environment=environment))
            start_s = time.perf_counter() - began_s
            groups[drafter] = _group(drafter, running, stack.enter_context(Client(running.address)), start_s)
        yield groups


def _group(drafter: str, services: SupervisedServices, client: Client, start_s: float) -> ServiceGroup:
    threads = {name: process.threads for name, process in services.processes.items()}
    pids = [process.pid for process in services.processes.values()]
    return ServiceGroup(drafter, client, threads["target"], threads.get("draft", 0), pids, start_s)


@contextmanager
def connect(address: str, drafters: Sequence[str]) -> Iterator[dict[str, ServiceGroup]]:
    """Yield groups of a running coordinator, which stands for all drafters.

    Raises (on entering):
        PeerUnavailable: nobody listens there.
    """
    with Client(address) as client:
        client.describe_models()
        yield {drafter: ServiceGroup(drafter, client) for drafter in dict.fromkeys(drafters)}


def cpu_seconds(processes: Sequence[int]) -> float:
    """Return the user and system time of processes and their children so far; one that has ended counts as 0."""
    times = _of_families(processes, psutil.Process.cpu_times)
    return sum((each.user + each.system for each in times), 0.0)


def resident_bytes(processes: Sequence[int]) -> int:
    """Return the resident memory of processes and their children; what several of them map counts for each."""
    return sum(each.rss for each in _of_families(processes, psutil.Process.memory_info))


def _of_families(processes: Sequence[int], read: Callable[[psutil.Process], Any]) -> list[Any]:
    """Read something of processes and their children that have not ended."""
    values = []
    for pid in processes:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            values += [read(process) for process in (root, *root.children(recursive=True))]
    return values
