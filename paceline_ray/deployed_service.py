"""One service as the controller sees it: the actors of its ranks, which begin together and end together."""

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
from paceline_ray.placement import lacks_room, remove, what_it_waits_for
from paceline_ray.records import (
    WITHOUT_ROOM,
    ActorReport,
    ActorState,
    ActorStatus,
    Meeting,
    Order,
    Peers,
    ServicePlan,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""After this time a service that has refused is tried again: a model's disk may be back."""


class RankActor:
    """One actor, what it reported last, and the call that it has not answered yet."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self.report: ActorReport | None = None
        self.lost = False
        self.asked: Any = None
        self.restarts = 0

    def ask(self, order: Order) -> None:
        """Send an order, unless the one before is unanswered: a process that starts or hangs gets no heap of them."""
        if self.asked is None:
            self.asked = self.handle.beat.remote(order)

    def take_answer(self) -> None:
        """Note the answer, which has come."""
        answer, self.asked = self.asked, None
        try:
            report: ActorReport = ray.get(answer)
        except RayActorError as error:
            if not self.lost:
                logger.warning("actor lost, Ray starts it again: actor=%s error=%s", self.name, error)
            self.lost = True
            return
        except RayError:
            logger.exception("actor failed to report: actor=%s", self.name)
            return
        if self.report is not None and self.report.incarnation != report.incarnation:
            self.restarts += 1
            logger.info("actor is back: actor=%s pid=%d node=%s", self.name, report.pid, report.node)
        self.report, self.lost = report, False

    @property
    def present(self) -> ActorReport | None:
        """Its last report, if its process is known to live."""
        return None if self.lost else self.report

    def end_process(self) -> None:
        """Have Ray start it again."""
        self.lost = True
        ray.kill(self.handle, no_restart=False)


class DeployedService:
    """A service and its actors, one a rank.

    `address` is where it served last: kept while its process is started again, since it comes back there if it can.
    `meeting` is the life that it leads now, or is to begin.
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
        """Where it serves, served last, or was told to."""
        self._first_port = plan.serving_port
        self._lack = ""
        self.meeting: Meeting | None = None
        self._refused_since: float | None = None

    @property
    def claim(self) -> str:
        """The node and port that it has, had, or was told to take; empty: none yet. Where it was, all know it."""
        return address_of(self._node, self._port) if self._node else ""

    def ask(self, peers: Peers) -> None:
        """Give every actor its order."""
        for actor in self.actors:
            actor.ask(Order(peers, self.meeting))

    def settle(self, may_begin: bool, claims: Container[str] = ()) -> None:
        """Decide from the reports who begins, and whose process has to end.

        Ranks live and die together: one that is new can't join others that run, which therefore are started again.

        Args:
            may_begin: whether what it needs is there.
            claims: of all services; what two took at once, one would fail for.
        """
        reports = [actor.present for actor in self.actors]
        first = reports[0]
        if first is not None and first.address:
            self.address = first.address
            self._node, self._port = first.node, int(first.address.rpartition(":")[2])
        self._forget_broken_meeting(reports)
        for actor, report in zip(self.actors, reports, strict=True):
            if report and report.state is not ActorState.WAITING and report.meeting != self.meeting:
                logger.warning("rank ends, since another one of its service was lost: actor=%s", actor.name)
                actor.end_process()
        waiting = [each for each in reports if each is not None and each.state is ActorState.WAITING]
        if self.meeting is None and may_begin and not self.leaving and len(waiting) == len(self.actors):
            self.meeting = self._meet(waiting, claims)
        self._retry_refused(reports)

    def remove(self) -> None:
        """End the actors for good."""
        for actor in self.actors:
            actor.lost = True
        remove((actor.handle for actor in self.actors), self._placement)

    def status(self) -> list[ActorStatus]:
        """A line an actor."""
        return [self._status(actor) for actor in self.actors]

    def look_for_room(self) -> None:
        """Note what it waits for, if Ray has no place for it."""
        absent = self._placement is not None and any(actor.present is None for actor in self.actors)
        if absent and lacks_room(self._placement):
            self._lack = f"waits for {what_it_waits_for(self._needs, ray.available_resources())}"
        else:
            self._lack = ""

    def _forget_broken_meeting(self, reports: list[ActorReport | None]) -> None:
        known = self.meeting.incarnations if self.meeting is not None else ()
        if any(each and each.state is ActorState.WAITING and each.incarnation not in known for each in reports):
            self.meeting = None
        elif self.meeting is None and reports[0] is not None:
            # This controller is new: it finds services that run.
            self.meeting = reports[0].meeting

    def _meet(self, waiting: list[ActorReport], claims: Container[str]) -> Meeting:
        first = waiting[0]
        if first.node != self._node:
            taken = address_of(first.node, self._first_port) in claims
            self._node, self._port = first.node, 0 if taken else self._first_port
        return Meeting(tuple(each.incarnation for each in waiting), first.node, first.free_port, self._port)

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
        if self._lack and actor.present is None:
            return ActorStatus(actor.name, self.role, WITHOUT_ROOM, restarts=actor.restarts, detail=self._lack)
        if report is None:
            return ActorStatus(actor.name, self.role, "starting")
        state = "lost" if actor.lost else "leaving" if self.leaving else report.state.value
        return ActorStatus(
            actor.name, self.role, state, report.address, report.node, report.pid, actor.restarts, report.detail
        )
