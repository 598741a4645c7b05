"""The controller's view of one service: the actors of its ranks, which start and end together."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup

from paceline.local.service_process import ProcessName
from paceline.rpc.server import address_of
from paceline_ray.placement import is_unschedulable, missing_resources, remove
from paceline_ray.records import (
    WITHOUT_ROOM,
    ActorReport,
    ActorState,
    ActorStatus,
    Order,
    Peers,
    Rendezvous,
    ServicePlan,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""Time after which a refusing service is started again: a model's disk may be back."""


class RankActor:
    """One actor, its last report, and the call that it has not answered yet."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self.report: ActorReport | None = None
        self.is_lost = False
        self.pending_call: Any = None
        self.restarts = 0

    def ask(self, order: Order) -> None:
        """Send an order unless the last one is unanswered, so that none pile up at a process that starts or hangs."""
        if self.pending_call is None:
            self.pending_call = self.handle.beat.remote(order)

    def take_report(self) -> None:
        """Take the report of the pending call, which has returned."""
        call, self.pending_call = self.pending_call, None
        try:
            report: ActorReport = ray.get(call)
        except RayActorError as error:
            if not self.is_lost:
                logger.warning("actor lost, Ray starts it again: actor=%s error=%s", self.name, error)
            self.is_lost = True
            return
        except RayError:
            logger.exception("actor failed to report: actor=%s", self.name)
            return
        if self.report is not None and self.report.incarnation != report.incarnation:
            self.restarts += 1
            logger.info("actor is back: actor=%s pid=%d node=%s", self.name, report.pid, report.node)
        self.report, self.is_lost = report, False

    @property
    def live_report(self) -> ActorReport | None:
        """Its last report, if its process is alive."""
        return None if self.is_lost else self.report

    def end_process(self) -> None:
        """Have Ray start it again."""
        self.is_lost = True
        ray.kill(self.handle, no_restart=False)


class DeployedService:
    """A service and its actors, one a rank.

    `address` is its last address. A restarted process serves there again if it can.
    `rendezvous` is the one that it started with, or is to start with.
    """

    def __init__(
        self,
        name: str,
        role: ProcessName,
        plan: ServicePlan,
        handles: Mapping[str, Any],
        placement: PlacementGroup | None,
    ) -> None:
        self.name = name
        self.role: ProcessName = role
        self.actors = [RankActor(each, handle) for each, handle in handles.items()]
        self.drain_seconds = plan.drain_seconds
        self.address = ""
        self.leaving = False
        self._needs = plan.needs
        self._placement = placement
        self._node = ""
        self._port = plan.serving_port
        """The port that it serves on, served on last, or was told to use."""
        self._first_port = plan.serving_port
        self._shortage = ""
        self.rendezvous: Rendezvous | None = None
        self._refused_since: float | None = None

    @property
    def claim(self) -> str:
        """HOST:PORT that it has, had last, or was told to take; empty: none yet. Its peers know the last address."""
        return address_of(self._node, self._port) if self._node else ""

    def ask(self, peers: Peers) -> None:
        """Give every actor its order."""
        for actor in self.actors:
            actor.ask(Order(peers, self.rendezvous))

    def reconcile(self, may_begin: bool, claims: Container[str] = ()) -> None:
        """Decide from the reports whether the service starts and which processes have to end.

        A new rank can't join running ranks, so those are started again.

        Args:
            may_begin: whether the services that it depends on are there.
            claims: of all services, so that no two take the same port.
        """
        reports = [actor.live_report for actor in self.actors]
        first = reports[0]
        if first is not None and first.address:
            self.address = first.address
            self._node, self._port = first.node, int(first.address.rpartition(":")[2])
        self._drop_broken_rendezvous(reports)
        for actor, report in zip(self.actors, reports, strict=True):
            if report and report.state is not ActorState.WAITING and report.rendezvous != self.rendezvous:
                logger.warning("rank ends, since another one of its service was lost: actor=%s", actor.name)
                actor.end_process()
        waiting = [each for each in reports if each is not None and each.state is ActorState.WAITING]
        if self.rendezvous is None and may_begin and not self.leaving and len(waiting) == len(self.actors):
            self.rendezvous = self._new_rendezvous(waiting, claims)
        self._retry_refused(reports)

    def remove(self) -> None:
        """End the actors for good."""
        for actor in self.actors:
            actor.is_lost = True
        remove((actor.handle for actor in self.actors), self._placement)

    def status(self) -> list[ActorStatus]:
        """The status of every actor."""
        return [self._status(actor) for actor in self.actors]

    def check_placement(self) -> None:
        """Note which resources it waits for, if Ray can't place it."""
        absent = self._placement is not None and any(actor.live_report is None for actor in self.actors)
        if absent and is_unschedulable(self._placement):
            self._shortage = f"waits for {missing_resources(self._needs, ray.available_resources())}"
        else:
            self._shortage = ""

    def _drop_broken_rendezvous(self, reports: list[ActorReport | None]) -> None:
        members = self.rendezvous.incarnations if self.rendezvous is not None else ()
        if any(each and each.state is ActorState.WAITING and each.incarnation not in members for each in reports):
            self.rendezvous = None
        elif self.rendezvous is None and reports[0] is not None:
            # This controller is new and has found a running service.
            self.rendezvous = reports[0].rendezvous

    def _new_rendezvous(self, waiting: list[ActorReport], claims: Container[str]) -> Rendezvous:
        first = waiting[0]
        if first.node != self._node:
            is_taken = address_of(first.node, self._first_port) in claims
            self._node, self._port = first.node, 0 if is_taken else self._first_port
        return Rendezvous(tuple(each.incarnation for each in waiting), first.node, first.free_port, self._port)

    def _retry_refused(self, reports: list[ActorReport | None]) -> None:
        if not any(each and each.state is ActorState.REFUSED for each in reports):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = time.monotonic()
        elif time.monotonic() - self._refused_since > RETRY_SECONDS:
            self._refused_since = None
            for actor in self.actors:
                actor.end_process()

    def _status(self, actor: RankActor) -> ActorStatus:
        report = actor.report
        if self._shortage and actor.live_report is None:
            return ActorStatus(actor.name, self.role, WITHOUT_ROOM, restarts=actor.restarts, detail=self._shortage)
        if report is None:
            return ActorStatus(actor.name, self.role, "starting")
        state = "lost" if actor.is_lost else "leaving" if self.leaving else report.state.value
        return ActorStatus(
            actor.name, self.role, state, report.address, report.node, report.pid, actor.restarts, report.detail
        )
