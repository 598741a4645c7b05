"""Deployments as a driver sees them: connecting to Ray, making, finding, changing and ending one."""

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
"""Of a local cluster: actors exchange a few hundred bytes. Ray would take 30 % of the memory."""
POLL_SECONDS = 0.5
CALL_SECONDS = 30.0
_READY = ActorState.SERVING.value


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[str]:
    """Be a driver of a cluster; yields its address.

    Args:
        address: as Ray takes it: HOST:PORT, `auto`, `local` for a new cluster of this machine that ends with the
            context; None: what RAY_ADDRESS says, or `local`.

    Raises:
        PeerUnavailable: no cluster is there.
    """
    # Read when Ray starts its processes: it sends nothing anywhere.
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
        """Make a deployment's actors; returns before they serve.

        Raises:
            InvalidInput: one of this name runs.
        """
        name = deployment.name
        if _find(name) is not None:
            raise InvalidInput.of("name", name, "that of no running deployment; `paceline ray down` ends one")
        # What a deployment has left whose controller was killed.
        remove_leftovers(name)
        made = ray.remote(DeploymentController).options(
            name=controller_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=8,
            num_cpus=0,
        )
        return cls(name, made.remote(deployment))

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
        """A line an actor.

        Raises:
            PeerUnavailable: the controller doesn't answer.
        """
        found: list[ActorStatus] = self._call(self._controller.status.remote(), CALL_SECONDS)
        return found

    def scale(self, role: ProcessName, count: int) -> None:
        """Have `count` services of a role; returns once those that leave have drained, before new ones serve.

        Raises:
            InvalidInput: not a role that is scaled, or a count out of its limits.
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
        self, timeout_s: float, progress: Callable[[ActorStatus], None], *, room_may_come: bool = True
    ) -> list[ActorStatus]:
        """Wait until whatever has room serves; `progress` is told of each once it does, or once Ray has no room.

        What no request can do without is waited for: a target, a coordinator, a gateway if there is to be one.

        Args:
            timeout_s: for all of them.
            progress: is told of each.
            room_may_come: whether the cluster may grow.

        Raises:
            ServiceRefused: a service refuses its model or a setting; says why.
            ServiceFailed: not all serve after `timeout_s`, or what is needed finds no room, which can't come; says
                which, and what Ray has free.
        """
        deadline = time.monotonic() + timeout_s
        told: set[tuple[str, str]] = set()
        while True:
            found = self.status()
            for line in found:
                if line.state == ActorState.REFUSED:
                    raise ServiceRefused(f"{line.name} on {line.node} refused: {line.detail}")
                if line.state in (_READY, WITHOUT_ROOM) and (line.name, line.state) not in told:
                    told.add((line.name, line.state))
                    progress(line)
            missing = _missing(found)
            if not missing:
                return found
            if not room_may_come and all(line.state == WITHOUT_ROOM for line in missing):
                raise ServiceFailed(f"no room: {_what_is_missing(missing)}; ask for less (--target-cpus, …)")
            if time.monotonic() > deadline:
                raise ServiceFailed(f"not serving after {timeout_s:g} s: {_what_is_missing(missing)}")
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


def _missing(lines: Sequence[ActorStatus]) -> list[ActorStatus]:
    """What doesn't serve and must, or is about to."""
    serving = {line.role for line in lines if line.state == _READY}
    without_room = [line for line in lines if line.state == WITHOUT_ROOM]
    needed = [line for line in without_room if line.role != "draft" and line.role not in serving]
    return needed + [line for line in lines if line.state not in (_READY, WITHOUT_ROOM)]


def _what_is_missing(missing: Sequence[ActorStatus]) -> str:
    return "; ".join(f"{each.name} is {each.state}{f' ({each.detail})' if each.detail else ''}" for each in missing)
