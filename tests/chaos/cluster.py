"""Services in processes of their own with a proxy before each, and the means to hurt and to mend them."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import struct
import subprocess
import threading
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from paceline.client import AsyncClient, Client
from paceline.local.certificates import write_certificates
from paceline.local.service_process import Flags, ProcessName
from paceline.local.tls import peer_tls, server_tls
from paceline.protocol.errors import PacelineError
from paceline.runtime.roles import PeerRole
from tests.chaos.guest import GuestDraft
from tests.chaos.proxy import Address, Proxy
from tests.chaos.shapes import BEHIND_GATEWAY, GUEST, PLAIN, Shape
from tests.chaos.trigger import Trigger, proxy_before
from tests.e2e.cluster import Cluster, eventually, free_port
from tests.metrics.scrape import Exposition

SOURCE = Path(__file__).with_name("shim.c")


class Shim:
    """Built in a folder, which services then find in their environment; needs a C compiler."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        assert compiler is not None, "clocks that jump and names that don't resolve need a C compiler (cc)"
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.absolute()
        library = self._folder / "shim.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_FOLDER": str(self._folder)}

    def jump(self, pid: int, seconds: int) -> None:
        with (self._folder / f"clock.{pid}").open("r+b") as file:
            file.write(struct.pack("=q", seconds))

    def resolve(self, name: str, addresses: Sequence[str]) -> None:
        """Have a name (`….chaos`) resolve so, from now on; without addresses: not."""
        hosts = self._folder / f"{name}.hosts"
        new = hosts.with_suffix(".new")
        new.write_text(" ".join(addresses))
        new.replace(hosts)


TARGET = "table:vocab=300,seed=1,eos=299,step_ms=6,max_length=2048"
NEAR = "table:vocab=300,seed=1,eos=299,noise=0.3,max_length=2048"
KV_ROWS = 8192
"""Room for 40 sessions: what a target keeps of prefixes fills the rest within minutes, and grows no further."""
NAME_OF = {"target": "targets.chaos", "draft": "drafts.chaos"}
CERTIFICATES_LAST = timedelta(days=1)
START_ALL_SECONDS = 240.0
"""Six processes that load at once on a machine with other work."""
PATIENCE_MS = 700.0
"""With a target that says nothing of a session: more than twice its life sign's interval, so that only one that is
frozen, or has lost the session, uses it up."""
DRAIN_SECONDS = 2.0
"""Several times what is left of any text."""
FLAGS: dict[ProcessName, Flags] = {
    "target": {"model": f"{TARGET},max_kv_rows={KV_ROWS}", "engine.prefill_chunk": 16, "engine.reproducible": True},
    "draft": {"drafters": [f"model:{NEAR}"]},
    "coordinator": {
        "model": TARGET,
        "round_timeout_ms": PATIENCE_MS,
        "draft_timeout_ms": 300.0,
        "reconnect_min_ms": 20.0,
        "reconnect_max_ms": 200.0,
    },
    "gateway": {"model": TARGET},
}


@dataclass(frozen=True)
class Held:
    pid: int
    descriptors: int
    threads: int
    resident_bytes: int


class ChaosCluster(Cluster):
    """Enter it, hurt it by its `trigger` and by signals, then `revive` and `settle` it."""

    def __init__(self, folder: Path, shape: Shape = PLAIN) -> None:
        self.shape = shape
        self.shim = Shim(folder / "shim") if shape.shim else None
        certificates = folder / "certificates" if shape.tls else None
        if certificates is not None:
            write_certificates(certificates, lifetime=CERTIFICATES_LAST)
        environment = self.shim.environment if self.shim else None
        super().__init__(folder, TARGET, (f"model:{NEAR}",), environment=environment, tls=certificates)
        self._start_timeout_s = START_ALL_SECONDS
        self.ports = {label: free_port() for label in shape.labels}
        self.trigger = Trigger()
        self.proxies: dict[str, Proxy] = {}
        self._stack = ExitStack()
        self._frozen: set[str] = set()
        self._limited: threading.Timer | None = None
        self._metrics_port = free_port()
        """Where the coordinator tells what it does."""
        self._named_ports: dict[str, int] = {}
        self.settle_s = 20.0
        """Longest time that what a fault left may take to go."""

    def start_all(self) -> None:
        self.guest = None if self.shape.tls else self._stack.enter_context(GuestDraft(NEAR))
        guest_port = int(self.guest.address.split(":")[1]) if self.guest else 0
        ports = self.ports | {BEHIND_GATEWAY: self.ports["coordinator"], GUEST: guest_port}
        for label, role in self.shape.role_of_proxy.items():
            upstream = ("127.0.0.1", ports[label])
            proxy = proxy_before(role, label, upstream, self.trigger, self._place(label), tls=self.shape.tls)
            self.proxies[label] = self._stack.enter_context(proxy)
        for role in ("target", "draft"):
            self.resolve(role, self.labels_of(role))
        for label, name in self.shape.labels.items():
            self.start(label, name, self._flags_of(label, name))
        self.await_serving(*self.shape.labels)
        self.await_all_up()

    def stop(self) -> None:
        for label in set(self._frozen):
            self.thaw(label)
        super().stop()
        self._stack.close()

    def through(self, label: str = "coordinator", **options: Any) -> AsyncClient:
        peer = self.reach(label).model_copy(update={"address": self.proxies[label].address})
        return AsyncClient(peer, **options)

    def labels_of(self, role: str) -> list[str]:
        return self.shape.labels_of(role)

    def resolve(self, role: str, labels: Iterable[str]) -> None:
        """Have the name of a role's processes lead to the proxies before these; without any: not resolve."""
        if self.shape.names and self.shim:
            addresses = [self.proxies[label].address.split(":")[0] for label in labels]
            self.shim.resolve(NAME_OF[role], addresses)

    def jump(self, label: str, seconds: int) -> None:
        pid = self.processes[label].pid
        assert self.shim is not None
        assert pid is not None
        self.shim.jump(pid, seconds)

    def cut(self, label: str) -> None:
        for each in (label, BEHIND_GATEWAY) if label == "coordinator" else (label,):
            if each in self.proxies:
                self.proxies[each].cut()

    def busy_label(self, role: str) -> str:
        """Of a role the process that has sessions now, or else the first."""
        labels = self.labels_of(role)
        if role in ("target", "draft"):
            busy = [each for each in labels if self._is_up(each) and self.status(each).sessions]
            labels = busy or labels
        return labels[0]

    def freeze(self, label: str, seconds: float) -> None:
        self._frozen.add(label)
        self.processes[label].signal(signal.SIGSTOP)
        threading.Timer(seconds, self.thaw, [label]).start()

    def thaw(self, label: str) -> None:
        self._frozen.discard(label)
        self.processes[label].signal(signal.SIGCONT)

    def limit(self, label: str, memory: bool, seconds: float) -> None:
        """Let a process have no more memory, or write no more to its log, for a while: it is told what a full disk
        tells (a file may grow no further)."""
        process = psutil.Process(self.processes[label].pid)
        which = psutil.RLIMIT_AS if memory else psutil.RLIMIT_FSIZE
        most = 0 if memory else self.processes[label].log_file.stat().st_size
        process.rlimit(which, (most, psutil.RLIM_INFINITY))
        self._limited = threading.Timer(seconds, _unlimit, [process, which])
        self._limited.start()

    def terminate(self, label: str) -> None:
        """SIGTERM, which drains; no wait for others takes its end for a failure."""
        self._killed_labels.add(label)
        self.processes[label].signal(signal.SIGTERM)

    def revive(self) -> None:
        """Start again what was killed or told to stop, once it has ended, and what ended by itself."""
        ended = {label for label, process in self.processes.items() if process.exit_code is not None}
        for label in ended | self._killed_labels:
            self._killed_labels.add(label)
            self.processes[label].wait(DRAIN_SECONDS + 10)
            self.start_again(label)
            self.await_serving(label)

    def settle(self) -> None:
        """Wait until all are linked and nothing is held.

        Raises:
            AssertionError: naming what is not so in time.
        """
        for label in set(self._frozen):
            self.thaw(label)
        if self._limited is not None:
            self._limited.join()
        self.revive()
        self.await_all_up()
        self.wait_idle(self.settle_s)
        if self.guest is not None:
            eventually(lambda: self.guest is not None and self.guest.sessions == 0, "the guest has no session")
        with Client(self.reach("coordinator"), timeout_s=5) as client:
            eventually(lambda: _sessions(client) == 0, "the coordinator has no session", self.settle_s)
        eventually(lambda: _active(self._metrics_port) == 0, "the coordinator has no request", self.settle_s)
        if "gateway" in self.processes:
            address = self.address_of("gateway")
            eventually(lambda: _running(address) == 0, "the gateway has no request", self.settle_s)

    def await_all_up(self) -> None:
        with Client(self.reach("coordinator"), timeout_s=5) as client:
            peers = sum(role in ("target", "draft") for role in self.shape.role_of_proxy.values())
            eventually(lambda: _linked(client) == peers, "every peer is linked")

    def held(self, label: str) -> Held:
        pid = self.processes[label].pid
        assert pid is not None
        process = psutil.Process(pid)
        with process.oneshot():
            return Held(pid, process.num_fds(), process.num_threads(), process.memory_info().rss)

    def _is_up(self, label: str) -> bool:
        return self.processes[label].exit_code is None and label not in self._frozen

    def _flags_of(self, label: str, name: ProcessName) -> Flags:
        guest = [self.proxies[GUEST].address] if GUEST in self.proxies else []
        peers: dict[ProcessName, Flags] = {
            "target": {"tensor_parallel_size": self.shape.ranks},
            "coordinator": {
                "target.address": self._addresses("target"),
                "draft.address": self._addresses("draft") + guest,
                "server.metrics_port": self._metrics_port,
                **peer_tls(self.tls),
            },
        }
        if name == "gateway":  # no peer of anybody's, and never under TLS here
            peers[name] = {"coordinator.address": self.proxies[BEHIND_GATEWAY].address}
        else:
            peers[name] = peers.get(name, {}) | server_tls(self.tls, PeerRole(name))
        common: Flags = {
            "server.port": self.ports[label],
            "server.log_format": "json",
            "server.drain_seconds": DRAIN_SECONDS,
        }
        return common | FLAGS[name] | peers.get(name, {})

    def _addresses(self, role: str) -> list[str]:
        labels = self.labels_of(role)
        if self.shape.names:
            return [f"dns:///{NAME_OF[role]}:{self._place(labels[0])[1]}"]
        return [self.proxies[label].address for label in labels]

    def _place(self, label: str) -> Address:
        """Where a proxy listens: those of one name on one port, each at an address of its own."""
        role = self.shape.role_of_proxy[label]
        if not self.shape.names or label not in self.shape.labels or role not in NAME_OF:
            return ("127.0.0.1", 0)
        port = self._named_ports.setdefault(role, free_port())
        return (f"127.0.0.{2 + self.labels_of(role).index(label)}", port)


def _unlimit(process: psutil.Process, which: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.rlimit(which, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


def _linked(client: Client) -> int:
    try:
        return sum(peer.up for model in client.describe_models() for peer in model.peers)
    except PacelineError:
        return 0


def _active(metrics_port: int) -> float:
    return sum(each.value for each in Exposition.at(metrics_port).series if each.name == "paceline_requests_active")


def _running(gateway: str) -> int:
    with urllib.request.urlopen(f"http://{gateway}/load", timeout=10) as answer:
        return int(json.load(answer)["server_load"])


def _sessions(client: Client) -> int:
    return sum(peer.sessions for model in client.describe_models() for peer in model.peers)
