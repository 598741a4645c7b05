"""Deployments from a driver's side: connecting to Ray; starting, finding, scaling and ending a deployment."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from paceline.local.service_process import ProcessName, ServiceFailed, ServiceRefused
from paceline.protocol.errors import InvalidInput, PacelineError, PeerUnavailable
from paceline_ray.controller import DeploymentController
from paceline_ray.placement import NAMESPACE, controller_name, remove_leftovers
from paceline_ray.records import WITHOUT_ROOM, ActorState, ActorStatus, Deployment

LOCAL = "local"
OBJECT_STORE_BYTES = 100_000_000
"""Object store of a local cluster: actors exchange a few hundred bytes. Ray's default is 30 % of the memory."""
POLL_SECONDS = 0.5
CALL_SECONDS = 30.0
_READY = ActorState.SERVING.value


@contextlib.contextmanager
def cluster_driver(address: str | None) -> Iterator[str]:
    """Be a driver of a cluster; yields its address.

    Args:
        address: as Ray takes it: HOST:PORT, `auto`, `local` for a new cluster of this machine that ends with the
            context; None: what RAY_ADDRESS says, or `local`.

    Raises:
        PeerUnavailable: no cluster at that address.
    """
    # Ray reads it when it starts its processes; they send no usage statistics.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    own: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="warning",
            **(own if address == LOCAL else {}),
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PeerUnavailable(f"no Ray cluster at {address}: {error}") from error
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def cluster_has_gpus() -> bool:
    """Whether any node has one, used or not."""
    return bool(ray.cluster_resources().get("GPU", 0.0) > 0)


class RunningDeployment:
    """A deployment that a controller keeps."""

    def __init__(self, name: str, controller: Any) -> None:
        self.name = name
        self._controller = controller

    @classmethod
    def start(cls, deployment: Deployment) -> RunningDeployment:
        """Create a deployment's actors; returns before they serve.

        Raises:
            InvalidInput: a deployment of this name is running.
        """
        name = deployment.name
        if _find(name) is not None:
            raise InvalidInput.of("name", name, "that of no running deployment; `paceline ray down` ends one")
        # Services of a deployment whose controller was killed.
        remove_leftovers(name)
        actor_class = ray.remote(DeploymentController).options(
            name=controller_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=8,
            num_cpus=0,
        )
        return cls(name, actor_class.remote(deployment))

    @classmethod
    def find(cls, name: str) -> RunningDeployment:
        """The deployment of this name.

        Raises:
            InvalidInput: there is none.
        """
        controller = _find(name)
        if controller is None:
            raise InvalidInput.of("name", name, "that of a deployment of this cluster; `paceline ray up` makes one")
        return cls(name, controller)

    def status(self) -> list[ActorStatus]:
        """The status of every actor.

        Raises:
            PeerUnavailable: the controller doesn't answer.
        """
        lines: list[ActorStatus] = self._call(self._controller.status.remote(), CALL_SECONDS)
        return lines

    def scale(self, role: ProcessName, count: int) -> None:
        """Set the number of a role's services. Returns once removed ones have drained, before new ones serve.

        Raises:
            InvalidInput: a role that can't be scaled, or a count out of its limits.
            PeerUnavailable: the controller doesn't answer.
        """
        self._call(self._controller.scale.remote(role, count))

    def down(self) -> None:
        """Drain and end every service, and the controller."""
        try:
            self._call(self._controller.down.remote())
        finally:
            ray.kill(self._controller, no_restart=True)
            remove_leftovers(self.name)

    def await_serving(
        self, timeout_s: float, progress: Callable[[ActorStatus], None], *, cluster_may_grow: bool = True
    ) -> list[ActorStatus]:
        """Wait until every service that Ray can place serves.

        Services that every request needs are waited for in any case: a target, a coordinator, and a gateway if the
        deployment has gateways.

        Args:
            timeout_s: for all of them.
            progress: called with each actor's status once it serves, and once Ray can't place it.
            cluster_may_grow: whether a service without room may still get some.

        Raises:
            ServiceRefused: a service refuses its model or a setting; says why.
            ServiceFailed: not all serve after `timeout_s`, or a service that every request needs has no room in a
                cluster that can't grow; says which, and what Ray has free.
        """
        deadline = time.monotonic() + timeout_s
        announcements: set[tuple[str, str]] = set()
        while True:
            lines = self.status()
            for line in lines:
                if line.state == ActorState.REFUSED:
                    raise ServiceRefused(f"{line.name} on {line.node} refused: {line.detail}")
                if line.state in (_READY, WITHOUT_ROOM) and (line.name, line.state) not in announcements:
                    announcements.add((line.name, line.state))
                    progress(line)
            missing = _missing_services(lines)
            if not missing:
                return lines
            if not cluster_may_grow and all(line.state == WITHOUT_ROOM for line in missing):
                raise ServiceFailed(f"no room: {_description(missing)}; ask for less (--target-cpus, …)")
            if time.monotonic() > deadline:
                raise ServiceFailed(f"not serving after {timeout_s:g} s: {_description(missing)}")
            time.sleep(POLL_SECONDS)

    def _call(self, answer: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(answer, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, PacelineError):
                raise error.cause from error
            raise
        except (RayActorError, RayError) as error:
            raise PeerUnavailable(f"the controller of {self.name} does not answer: {error}") from error


def _find(name: str) -> Any:
    try:
        return ray.get_actor(controller_name(name), namespace=NAMESPACE)
    except ValueError:  # what Ray raises where there is none
        return None


def _missing_services(lines: Sequence[ActorStatus]) -> list[ActorStatus]:
    """Actors that don't serve yet but must, or soon will."""
    serving = {line.role for line in lines if line.state == _READY}
    without_room = [line for line in lines if line.state == WITHOUT_ROOM]
    essential = [line for line in without_room if line.role != "draft" and line.role not in serving]
    return essential + [line for line in lines if line.state not in (_READY, WITHOUT_ROOM)]


def _description(missing: Sequence[ActorStatus]) -> str:
    return "; ".join(f"{each.name} is {each.state}{f' ({each.detail})' if each.detail else ''}" for each in missing)
