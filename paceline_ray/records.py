"""The messages between the controller and the service actors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from paceline.local.service_process import ProcessName


class ActorState(StrEnum):
    """State of an actor's service."""

    WAITING = "waiting"
    """The process is new and waits for its rendezvous."""
    LOADING = "loading"
    SERVING = "serving"
    STOPPED = "stopped"
    REFUSED = "refused"
    """The service refuses its model or a setting; the report has the reason."""


WITHOUT_ROOM = "without room"
"""State of a service that Ray can't place yet; `detail` says which resources it waits for."""


@dataclass(frozen=True)
class Peers:
    """The current endpoints, HOST:PORT each."""

    targets: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    coordinators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rendezvous:
    """The processes that start a service together, one a rank, and where they meet.

    Attributes:
        incarnations: of the processes, by rank; no other process takes part.
        host, port: where ranks find rank 0.
        serving_port: the port that the service had before, so that its address stays the same; 0: any port.
    """

    incarnations: tuple[str, ...]
    host: str
    port: int
    serving_port: int = 0


@dataclass(frozen=True)
class Order:
    """The controller's message to an actor, twice a second; `rendezvous` is None until the service may start."""

    peers: Peers
    rendezvous: Rendezvous | None = None


@dataclass(frozen=True)
class ActorReport:
    """An actor's answer to an order.

    Attributes:
        incarnation: identifies its process.
        node: the address of its Ray node.
        free_port: a port that was free there a moment ago.
        address: HOST:PORT of the service, once it is SERVING; empty for a rank that doesn't serve.
        rendezvous: the one that its service started with; None: it has not started.
        detail: what was refused and why.
    """

    incarnation: str
    state: ActorState
    node: str
    pid: int
    free_port: int = 0
    address: str = ""
    rendezvous: Rendezvous | None = None
    detail: str = ""


@dataclass(frozen=True)
class ActorStatus:
    """One actor as `paceline ray status` shows it.

    Attributes:
        state: an `ActorState`; `starting`, `lost` or `without room` if there is no report; `leaving` before removal.
        restarts: how often Ray has replaced its process.
    """

    name: str
    role: ProcessName
    state: str
    address: str = ""
    node: str = ""
    pid: int = 0
    restarts: int = 0
    detail: str = ""


@dataclass(frozen=True)
class ServiceNeeds:
    """What Ray reserves for each process of a service, and its number of processes."""

    cpus: float
    gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)
    ranks: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        """As a bundle of a placement group; Ray takes no resource of 0."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount > 0}


@dataclass(frozen=True)
class ServicePlan:
    """How every service of one role is configured and placed.

    Attributes:
        settings: the sections and values that are set, as its configuration type takes them.
        needs: resources of each of its processes.
        drain_seconds: time that running sessions get before the service ends.
        count: number of services at the start.
        serving_port: port of one of them on each node, if it is free; 0: any port.
    """

    settings: dict[str, object]
    needs: ServiceNeeds
    drain_seconds: float
    count: int
    serving_port: int = 0


@dataclass(frozen=True)
class Deployment:
    """All that runs under one name."""

    name: str
    model: str
    plans: dict[ProcessName, ServicePlan]
