"""What the controller and the service actors tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from paceline.local.service_process import ProcessName


class ActorState(StrEnum):
    """Where the service of an actor is in its life."""

    WAITING = "waiting"
    """The process is new: it begins when it is told whom to meet."""
    LOADING = "loading"
    SERVING = "serving"
    STOPPED = "stopped"
    REFUSED = "refused"
    """The service refuses its model or a setting; the report has the reason."""


WITHOUT_ROOM = "without room"
"""The state of a service that Ray has no place for yet; the detail says what it waits for."""


@dataclass(frozen=True)
class Peers:
    """The endpoints of now, HOST:PORT each."""

    targets: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    coordinators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Meeting:
    """One life of a service: the processes that begin it together, one a rank, and where they meet.

    Attributes:
        incarnations: of the processes, by rank; no other process is meant.
        host, port: where ranks find rank 0.
        serving_port: what the service had listened on before, so that nobody has to learn of a new one; 0: any.
    """

    incarnations: tuple[str, ...]
    host: str
    port: int
    serving_port: int = 0


@dataclass(frozen=True)
class Order:
    """What the controller tells an actor twice a second; the meeting is None until it may begin."""

    peers: Peers
    meeting: Meeting | None = None


@dataclass(frozen=True)
class ActorReport:
    """What an actor answers.

    Attributes:
        incarnation: of its process.
        node: the address of its Ray node.
        free_port: a port that was free there a moment ago.
        address: HOST:PORT of the service, once it is SERVING; empty for a rank that doesn't serve.
        meeting: the one that it has begun with.
        detail: what was refused and why.
    """

    incarnation: str
    state: ActorState
    node: str
    pid: int
    free_port: int = 0
    address: str = ""
    meeting: Meeting | None = None
    detail: str = ""


@dataclass(frozen=True)
class ActorStatus:
    """One actor as `paceline ray status` shows it.

    Attributes:
        state: an `ActorState`, or why there is no report: `starting`, `lost`, `without room`; or `leaving` before it
            is removed.
        restarts: processes that Ray has started in place of one that had ended.
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
    """What Ray reserves for each process of a service, and how many processes it has."""

    cpus: float
    gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)
    ranks: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        """As a bundle of a placement group; Ray takes no resource of 0."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount > 0}


@dataclass(frozen=True)
class ServicePlan:
    """How every service of one role is configured and placed.

    Attributes:
        settings: the sections and values that are set, as its configuration type takes them.
        needs: of each of its processes.
        drain_seconds: that running sessions get before it ends.
        count: services to begin with.
        serving_port: what one of them on each node listens on if it is free; 0: any port.
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
