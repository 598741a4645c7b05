"""The actor that keeps a deployment in its planned state.

It asks every actor for a report twice a second and sends coordinators the current endpoints. It stores nothing: after
a restart it finds the actors by their names and learns the rest from their reports.
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
"""Time between a service's removal from the endpoint files, which are read each second, and its drain."""
STOP_SECONDS = 20.0
"""Time to end after the drain, for a service, and then for its ranks after rank 0."""
MAX_SERVICES = 1024
"""Most services of one role."""
SCALABLE_ROLES: tuple[ProcessName, ...] = ("draft", "coordinator", "gateway")
LISTED_ROLES: tuple[ProcessName, ...] = ("draft", "coordinator")
"""Roles whose endpoints other services read from files."""
SHUTDOWN_ORDER: tuple[tuple[ProcessName, ...], ...] = (("gateway",), ("coordinator",), ("target", "draft"))


class DeploymentController:
    """Ray calls its methods on several threads; a thread of its own sends the beats."""

    def __init__(self, deployment: Deployment) -> None:
        """Find the deployment's services, or create them if there are none."""
        log_to_stderr()
        self._deployment = deployment
        self._lock = threading.Lock()
        self._scale_lock = threading.Lock()
        """For the one call that adds or removes services."""
        self._stop_event = threading.Event()
        self._services: dict[str, DeployedService] = {}
        for name in services_of(deployment.name) or placement_order(deployment):
            self._add(name)
        threading.Thread(target=self._keep_beating, name="beats", daemon=True).start()

    def status(self) -> list[ActorStatus]:
        """The status of every actor, by name."""
        with self._lock:
            return [
                line for name in sorted(self._services, key=role_and_index) for line in self._services[name].status()
            ]

    def scale(self, role: ProcessName, count: int) -> None:
        """Set the number of a role's services. Returns once new ones are created and removed ones have drained.

        Raises:
            InvalidInput: a role that can't be scaled, or a count out of its limits.
        """
        require(role in SCALABLE_ROLES, "role", role, f"one of {', '.join(SCALABLE_ROLES)}")
        lacks = "HTTP" if role == "gateway" else "draft model"
        require(role in self._deployment.plans, f"{role}s", count, f"left out: the deployment has no {lacks}")
        least = 0 if role == "draft" else 1
        require(least <= count <= MAX_SERVICES, f"{role}s", count, f"in [{least}, {MAX_SERVICES}]")
        with self._scale_lock:
            self._scale(role, count)

    def down(self) -> None:
        """Drain and end every service, those that clients call first; returns when all have ended."""
        with self._scale_lock:
            every = list(self._services.values())
            for roles in SHUTDOWN_ORDER:
                self._remove([service for service in every if service.role in roles])
        self._stop_event.set()

    def _scale(self, role: ProcessName, count: int) -> None:
        with self._lock:
            services = sorted(self._services.values(), key=lambda service: role_and_index(service.name))
            staying = [service for service in services if service.role == role and not service.leaving]
            free = (name for index in itertools.count() if (name := f"{role}-{index}") not in self._services)
            for _ in range(count - len(staying)):
                self._add(next(free))
            leaving = staying[count:]
        self._remove(leaving, NOTICE_SECONDS if role in LISTED_ROLES else 0.0)

    def _add(self, name: str) -> None:
        role, _ = role_and_index(name)
        plan = self._deployment.plans[role]
        self._services[name] = DeployedService(name, role, plan, *place(self._deployment.name, name, plan))

    def _keep_beating(self) -> None:
        while not self._stop_event.is_set():
            began = time.monotonic()
            try:
                self._beat()
            except Exception:  # a beat that fails must not be the last one
                logger.exception("beat failed")
            self._stop_event.wait(max(0.0, began + BEAT_SECONDS - time.monotonic()))

    def _beat(self) -> None:
        with self._lock:
            services = list(self._services.values())
            peers = self._peers(services)
            for service in services:
                service.ask(peers)
            calls = {actor.pending_call: actor for service in services for actor in service.actors}
        if not calls:
            return
        finished_calls, _ = ray.wait(list(calls), num_returns=len(calls), timeout=BEAT_SECONDS)
        with self._lock:
            for call in finished_calls:
                calls[call].take_report()
            claims = {service.claim for service in services}
            for service in services:
                # A coordinator without a target would refuse its requests.
                service.reconcile(may_begin=service.role != "coordinator" or bool(peers.targets), claims=claims)
                claims.add(service.claim)
        for service in services:
            service.check_placement()

    @staticmethod
    def _peers(services: Iterable[DeployedService]) -> Peers:
        live_services = [service for service in services if service.address and not service.leaving]

        def addresses(role: ProcessName) -> tuple[str, ...]:
            return tuple(service.address for service in live_services if service.role == role)

        return Peers(addresses("target"), addresses("draft"), addresses("coordinator"))

    def _remove(self, services: list[DeployedService], notice_s: float = 0.0) -> None:
        if not services:
            return
        with self._lock:
            for service in services:
                service.leaving = True
        self._stop_event.wait(notice_s)
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


def placement_order(deployment: Deployment) -> list[str]:
    """The initial services in the order in which Ray places them: those that the others depend on come first."""
    places = [(index, role) for role, plan in deployment.plans.items() for index in range(plan.count)]
    return [f"{role}-{index}" for index, role in sorted(places, key=lambda place: place[0])]


def _await(calls: Iterable[Any], timeout_s: float) -> None:
    """Wait until calls have returned or failed, for at most `timeout_s`."""
    pending = list(calls)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=timeout_s)


def _first(service: DeployedService) -> list[RankActor]:
    return [actor for actor in service.actors[:1] if actor.live_report is not None]


def _followers(service: DeployedService) -> list[RankActor]:
    return [actor for actor in service.actors[1:] if actor.live_report is not None]
