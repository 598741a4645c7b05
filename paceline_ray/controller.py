"""The actor that keeps a deployment as it should be, and knows where everything is.

It asks every actor twice a second and tells coordinators the endpoints of now. Nothing that it knows is written down:
started again, it finds the actors by their names and learns the rest from their reports.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

import ray

from paceline.local.service_process import ProcessName
from paceline.protocol.errors import require
from paceline.runtime.logs import log_to_stderr
from paceline_ray.deployed_service import DeployedService, RankActor
from paceline_ray.placement import place, role_and_index, services_of
from paceline_ray.records import ActorStatus, Deployment, Peers

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
NOTICE_SECONDS = 2.0
"""Between a service's leaving the lists and its drain: they are read each second."""
STOP_SECONDS = 20.0
"""What a service may take to end beyond its drain, and the other ranks once rank 0 has let them go."""
MAX_SERVICES = 1024
"""Of one role."""
SCALED: tuple[ProcessName, ...] = ("draft", "coordinator", "gateway")
NOTICED: tuple[ProcessName, ...] = ("draft", "coordinator")
"""Those that others find in lists."""
FIRST_TO_END: tuple[tuple[ProcessName, ...], ...] = (("gateway",), ("coordinator",), ("target", "draft"))


class DeploymentController:
    """Ray calls its methods on several threads; one of its own beats."""

    def __init__(self, deployment: Deployment) -> None:
        """Find the deployment's services, or make them if there is none."""
        log_to_stderr()
        self._deployment = deployment
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        """Held by the one call that adds or removes services."""
        self._ended = threading.Event()
        self._services: dict[str, DeployedService] = {}
        for name in services_of(deployment.name) or in_order_of_room(deployment):
            self._add(name)
        threading.Thread(target=self._keep_beating, name="beats", daemon=True).start()

    def status(self) -> list[ActorStatus]:
        """A line an actor, by name."""
        with self._lock:
            return [
                line for name in sorted(self._services, key=role_and_index) for line in self._services[name].status()
            ]

    def scale(self, role: ProcessName, count: int) -> None:
        """Have `count` services of a role: returns once new ones are made and those that leave have drained.

        Raises:
            InvalidInput: not a role that is scaled, or a count out of its limits.
        """
        require(role in SCALED, "role", role, f"one of {', '.join(SCALED)}")
        lacks = "HTTP" if role == "gateway" else "draft model"
        require(role in self._deployment.plans, f"{role}s", count, f"left out: the deployment has no {lacks}")
        least = 0 if role == "draft" else 1
        require(least <= count <= MAX_SERVICES, f"{role}s", count, f"in [{least}, {MAX_SERVICES}]")
        with self._changing:
            self._scale(role, count)

    def down(self) -> None:
        """Drain and end every service, what clients talk to first; returns when none is left."""
        with self._changing:
            every = list(self._services.values())
            for roles in FIRST_TO_END:
                self._remove([service for service in every if service.role in roles])
        self._ended.set()

    def _scale(self, role: ProcessName, count: int) -> None:
        with self._lock:
            known = sorted(self._services.values(), key=lambda service: role_and_index(service.name))
            staying = [service for service in known if service.role == role and not service.leaving]
            free = (name for index in itertools.count() if (name := f"{role}-{index}") not in self._services)
            for _ in range(count - len(staying)):
                self._add(next(free))
            leaving = staying[count:]
        self._remove(leaving, NOTICE_SECONDS if role in NOTICED else 0.0)

    def _add(self, name: str) -> None:
        role, _ = role_and_index(name)
        plan = self._deployment.plans[role]
        self._services[name] = DeployedService(name, role, plan, *place(self._deployment.name, name, plan))

    def _keep_beating(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                self._beat()
            except Exception:  # a beat that fails must not be the last one
                logger.exception("beat failed")
            self._ended.wait(max(0.0, began + BEAT_SECONDS - time.monotonic()))

    def _beat(self) -> None:
        with self._lock:
            services = list(self._services.values())
            peers = self._peers(services)
            for service in services:
                service.ask(peers)
            asked = {actor.asked: actor for service in services for actor in service.actors}
        if not asked:
            return
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=BEAT_SECONDS)
        with self._lock:
            for answer in answered:
                asked[answer].take_answer()
            claims = {service.claim for service in services}
            for service in services:
                # A coordinator without a target would refuse its requests.
                service.settle(may_begin=service.role != "coordinator" or bool(peers.targets), claims=claims)
                claims.add(service.claim)
        for service in services:
            service.look_for_room()

    @staticmethod
    def _peers(services: Iterable[DeployedService]) -> Peers:
        known = [service for service in services if service.address and not service.leaving]

        def of(role: ProcessName) -> tuple[str, ...]:
            return tuple(service.address for service in known if service.role == role)

        return Peers(of("target"), of("draft"), of("coordinator"))

    def _remove(self, services: list[DeployedService], notice_s: float = 0.0) -> None:
        if not services:
            return
        with self._lock:
            for service in services:
                service.leaving = True
        self._ended.wait(notice_s)
        longest = max(service.drain_seconds for service in services)
        _await(
            (actor.handle.stop.remote() for service in services for actor in _first(service)), longest + STOP_SECONDS
        )
        _await((actor.handle.wait.remote() for service in services for actor in _followers(service)), STOP_SECONDS)
        with self._lock:
            for service in services:
                logger.info("service ends: name=%s/%s", self._deployment.name, service.name)
                service.remove()
                del self._services[service.name]


def in_order_of_room(deployment: Deployment) -> list[str]:
    """The services to begin with, those first without which the others are of no use; Ray looks for room in order."""
    places = [(index, role) for role, plan in deployment.plans.items() for index in range(plan.count)]
    return [f"{role}-{index}" for index, role in sorted(places, key=lambda place: place[0])]


def _await(calls: Iterable[Any], timeout_s: float) -> None:
    """Wait until calls have returned or failed, for at most `timeout_s`."""
    pending = list(calls)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=timeout_s)


def _first(service: DeployedService) -> list[RankActor]:
    return [actor for actor in service.actors[:1] if actor.present is not None]


def _followers(service: DeployedService) -> list[RankActor]:
    return [actor for actor in service.actors[1:] if actor.present is not None]
