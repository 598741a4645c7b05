"""A Ray Serve application that owns a deployment, for KubeRay's RayService: `import_path: …serve_application:build`.

Serve starts it, asks whether it is healthy, and ends it. No request passes through Serve: clients talk gRPC to the
coordinators, whose endpoints a GET of the application's route lists.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from ray import serve

from paceline.protocol.errors import InvalidInput
from paceline_ray.deployments import RunningDeployment, cluster_has_gpus
from paceline_ray.settings import ConfigFiles, RaySettings, plan_deployment

logger = logging.getLogger(__name__)

START_SECONDS = 1800.0
END_SECONDS = 1500.0
"""Above the longest drain of coordinators and then of targets, twice `drain_seconds` of at most 600."""


class DeploymentOwner:
    """Owns the deployment: starts it, and takes it down at its own end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # Serve's own proxy has the port of HTTP.
        ray_settings = RaySettings(**({"http": False} | settings))
        plan = plan_deployment(ray_settings, ConfigFiles(), cluster_has_gpus=cluster_has_gpus())
        try:
            self._running = RunningDeployment.find(plan.name)  # of a replica that was lost
        except InvalidInput:
            self._running = RunningDeployment.start(plan)
        self._running.await_serving(
            START_SECONDS, lambda line: logger.info("serving: %s %s", line.name, line.address)
        )

    def check_health(self) -> None:
        """Serve's health check; the controller restarts actors itself.

        Raises:
            PeerUnavailable: the controller doesn't answer.
        """
        self._running.status()

    def __call__(self, request: object) -> list[dict[str, Any]]:
        """Every actor's status, the JSON answer to an HTTP request."""
        return [asdict(line) for line in self._running.status()]

    def __del__(self) -> None:
        if hasattr(self, "_running"):
            self._running.down()


def build(settings: dict[str, Any]) -> Any:
    """The application; `settings` are those of `paceline ray up` by name, such as `draft_gpus: 0.25`."""
    owner = serve.deployment(
        DeploymentOwner,
        name="paceline",
        num_replicas=1,
        graceful_shutdown_timeout_s=END_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    return owner.bind(settings)
