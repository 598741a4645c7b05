"""A service as a Ray actor: it starts on the controller's order, and reports.

The service runs in the actor's process. The process ends with the service, and Ray starts a new one. A new process
knows nothing of the last one; the controller sends it all that it needs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import ray.util

from paceline.local.service_process import ProcessName, is_serving, thread_environment
from paceline.rpc.server import address_of
from paceline.runtime.config import CoordinatorConfig, DraftConfig, TargetConfig, load_config
from paceline.runtime.files import replace_text
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.logs import log_to_stderr
from paceline_ray.records import ActorReport, ActorState, Order, Peers, Rendezvous
from paceline_ray.service_thread import ServiceThread

HEALTH_SECONDS = 0.3
"""How long a health check may take; the controller asks again."""
DRAIN_MARGIN_S = 10.0
"""Time to end after the drain."""
EVERY_ADDRESS = ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared, not bound
_PEERS: Mapping[ProcessName, tuple[str, ...]] = {"coordinator": ("target", "draft"), "gateway": ("coordinator",)}
"""The sections of a role's settings that name peers, whose addresses come from files."""
Settings = Mapping[str, object]


class ServiceActor:
    """One process of a service; Ray calls its methods on several threads.

    Args:
        role: the service's role.
        rank: rank of this process among those of a target.
        settings: the sections and values that are set.
        drain_seconds: time that running sessions get when the service stops.
    """

    def __init__(self, role: ProcessName, rank: int, settings: Settings, drain_seconds: float) -> None:
        log_to_stderr()
        self._role: ProcessName = role
        self._rank = rank
        self._settings = settings
        self._drain_seconds = drain_seconds
        server = settings.get("server", {})
        assert isinstance(server, Mapping)
        self._server: Mapping[str, Any] = server
        self._incarnation = secrets.token_hex(8)
        self._node: str = ray.util.get_node_ip_address()
        self._host: str = server.get("host", self._node)
        self._public_host = self._node if self._host in EVERY_ADDRESS else self._host
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._peers: Peers | None = None
        self._rendezvous: Rendezvous | None = None
        self._service: ServiceThread | None = None
        self._health_port = 0
        # Ray has set OMP_NUM_THREADS to the CPUs that it reserves.
        os.environ |= thread_environment(int(os.environ.get("OMP_NUM_THREADS", "1")))

    def beat(self, order: Order) -> ActorReport:
        """Take an order and report."""
        if order.peers != self._peers and self._role in _PEERS:
            self._write(order.peers)
        self._peers = order.peers
        rendezvous = order.rendezvous
        if self._service is None and rendezvous and rendezvous.incarnations[self._rank] == self._incarnation:
            self._begin(rendezvous)
        return self._report()

    def stop(self) -> None:
        """Drain; returns when the service has ended, or its time is up."""
        if self._service is not None:
            self._service.stop(self._drain_seconds + DRAIN_MARGIN_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self) -> None:
        """Wait for the end of a rank above 0, which ends after rank 0."""
        if self._service is not None:
            self._service.wait(DRAIN_MARGIN_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _port_file(self) -> Path:
        return self._folder / "serving"

    def _file(self, peers: str) -> Path:
        return self._folder / peers

    def _write(self, peers: Peers) -> None:
        for name, addresses in asdict(peers).items():
            replace_text(self._file(name), "".join(f"{each}\n" for each in addresses))

    def _begin(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._health_port = free_port(self._host)
        if len(rendezvous.incarnations) > 1:
            os.environ |= rank_environment(rendezvous, self._rank, self._node)
        settings = self._own_settings(rendezvous)
        self._service = ServiceThread(f"{self._role} service", lambda: service(self._role, settings))

    def _own_settings(self, rendezvous: Rendezvous) -> dict[str, object]:
        """The settings with this process's address and the files of its peers' endpoints."""
        own: dict[str, object] = {
            "host": self._host,
            "port": rendezvous.serving_port if is_free(self._host, rendezvous.serving_port) else 0,
            "health_port": self._health_port,
            "port_file": self._port_file,
            "drain_seconds": self._drain_seconds,
        }
        settings = {**self._settings, "server": {**self._server, **own}}
        for peer in _PEERS.get(self._role, ()):
            section = self._settings.get(peer)
            if isinstance(section, Mapping):
                settings[peer] = {**section, "address": f"file:{self._file(f'{peer}s')}"}
        return settings

    def _report(self) -> ActorReport:
        state = self._state()
        return ActorReport(
            incarnation=self._incarnation,
            state=state,
            node=self._node,
            pid=os.getpid(),
            free_port=free_port(self._node) if self._service is None else 0,
            address=self._address() if state is ActorState.SERVING else "",
            rendezvous=self._rendezvous,
            detail=self._service.detail if self._service is not None else "",
        )

    def _state(self) -> ActorState:
        if self._service is None:
            return ActorState.WAITING
        if self._service.outcome is not None:
            return self._service.outcome
        return ActorState.SERVING if self._is_serving() else ActorState.LOADING

    def _is_serving(self) -> bool:
        if self._rank > 0:
            return True  # a rank above 0 has no server: rank 0 serves only once all have loaded
        if self._role == "gateway":
            return self._port_file.exists()
        return is_serving(address_of(self._public_host, self._health_port), HEALTH_SECONDS)

    def _address(self) -> str:
        if self._rank > 0 or not self._port_file.exists():
            return ""
        return address_of(self._public_host, int(self._port_file.read_text().rpartition(":")[2]))


def service(role: ProcessName, settings: Settings) -> Coroutine[Any, Any, None]:
    """The coroutine that a container of that role runs.

    Raises:
        InvalidInput: a setting out of its limits.
    """
    match role:
        case "target":
            from target_service.__main__ import start as start_target

            return start_target(load_config(TargetConfig, None, settings))
        case "draft":
            from draft_service.__main__ import start as start_draft

            return start_draft(load_config(DraftConfig, None, settings))
        case "coordinator":
            from coordinator.__main__ import serve

            return serve(load_config(CoordinatorConfig, None, settings))
        case "gateway":
            from paceline_gateway.__main__ import serve as serve_http

            return serve_http(load_config(GatewayConfig, None, settings))


def rank_environment(rendezvous: Rendezvous, rank: int, node: str) -> dict[str, str]:
    """The variables that torchrun sets for a rank. Ray shows each rank its own GPUs alone, so its local rank is 0."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(rendezvous.incarnations)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.port),
    }
    interface = interface_of(node)
    if interface is not None:
        # Gloo would resolve the host's name, whose address the other nodes may not reach.
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    with socket.create_server((host, 0), family=_family(host)) as probe:
        port: int = probe.getsockname()[1]
        return port


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now."""
    try:
        with socket.create_server((host, port), family=_family(host)):
            return True
    except OSError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
