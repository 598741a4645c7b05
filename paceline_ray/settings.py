"""The settings of `paceline ray up`, and the plan for each service that follows from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field, field_validator

from paceline.local.service_process import Flags, ProcessName
from paceline.local.settings import ServeSettings, coordinator_flags, draft_flags, gateway_flags, target_flags
from paceline.models.table_names import is_table
from paceline.protocol.errors import InvalidInput, require
from paceline.runtime.config import (
    LOCALHOST,
    CoordinatorConfig,
    DraftConfig,
    ModelSettings,
    TargetConfig,
    load_config,
)
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.settings import Settings
from paceline_ray.records import Deployment, ServiceNeeds, ServicePlan

DEFAULT_NAME = "paceline"
UNKNOWN_PEER = "unknown:1"
"""Placeholder of an endpoint until the service runs; each coordinator reads its endpoints from a file."""
NOT_ON_RAY = ("draft_port", "target_port", "max_restarts", "cores")
"""Settings of `paceline serve` that Ray decides: any free port, restarts of dead actors always, and reserved CPUs."""
_RAYS_OWN: Flags = {"server.port": None, "engine.threads": None}
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_RESOURCE = re.compile(r"(?P<name>\w+)=(?P<amount>\d+(\.\d+)?)")
_GPU_SHARE: float = ModelSettings.model_fields["gpu_memory_utilization"].default


class RaySettings(ServeSettings):
    """Settings of `paceline ray up`. The services decide those that are not set."""

    host: str = Field(
        "",
        description=f"Address that coordinators and gateways listen on; unset: their node's, or {LOCALHOST} in a new "
        "local cluster.",
    )
    name: str = Field(DEFAULT_NAME, description="Name of the deployment.")
    targets: int = Field(1, ge=1, le=1024, description="Target services.")
    drafts: int = Field(1, ge=0, le=1024, description="Draft services.")
    coordinators: int = Field(1, ge=1, le=1024, description="Coordinators.")
    gateways: int = Field(1, ge=1, le=1024, description="HTTP gateways, each before all coordinators.")
    target_cpus: float = Field(1.0, ge=0, le=1024, description="CPUs of each target rank: its compute threads.")
    target_gpus: float | None = Field(
        None, ge=0, le=1, description="GPUs of each target rank; unset: 1 where the cluster has GPUs."
    )
    draft_cpus: float = Field(0.5, ge=0, le=1024, description="CPUs of each draft service.")
    draft_gpus: float = Field(0.0, ge=0, le=1, description="Share of a GPU that each draft service gets.")
    draft_resource: str | None = Field(None, description="A resource of your own for each draft: NAME=AMOUNT.")
    coordinator_cpus: float = Field(0.5, ge=0, le=1024, description="CPUs of each coordinator.")
    drain_seconds: float = Field(30.0, ge=0, le=600, description="Time that running requests get when one stops.")

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if _NAME.fullmatch(name) is None:
            raise ValueError("lower-case letters, digits and dashes")
        return name


@dataclass(frozen=True)
class ConfigFiles:
    """A TOML file for each service, whose settings the flags override."""

    target: Path | None = None
    draft: Path | None = None
    coordinator: Path | None = None


def plan_deployment(
    settings: RaySettings, files: ConfigFiles, *, cluster_has_gpus: bool, on_one_machine: bool = False
) -> Deployment:
    """The plan of every service.

    Args:
        settings: what is deployed.
        files: settings that no flag gives.
        cluster_has_gpus: whether any node has a GPU.
        on_one_machine: the cluster is a new local one: services listen on this machine alone unless a setting
            says otherwise.

    Raises:
        InvalidInput: a setting out of its limits, naming it.
    """
    plans: dict[ProcessName, ServicePlan] = {
        "target": _target_plan(settings, files.target, cluster_has_gpus),
        "coordinator": _coordinator_plan(settings, files.coordinator),
    }
    if settings.http:
        plans["gateway"] = _gateway_plan(settings)
    if settings.draft_models:
        plans["draft"] = _draft_plan(settings, files.draft)
    if on_one_machine:
        plans = {role: replace(plan, settings=_for_this_machine(plan.settings)) for role, plan in plans.items()}
    return Deployment(settings.name, settings.model, plans)


def _for_this_machine(settings: dict[str, object]) -> dict[str, object]:
    return _with_defaults(settings, "server", {"host": LOCALHOST})


def _target_plan(settings: RaySettings, file: Path | None, cluster_has_gpus: bool) -> ServicePlan:
    gpus = settings.target_gpus
    if gpus is None:
        gpus = 1.0 if cluster_has_gpus and not is_table(settings.model) else 0.0
    overrides = _overrides(TargetConfig, file, target_flags(settings, 1) | _RAYS_OWN)
    ranks = load_config(TargetConfig, None, overrides).tensor_parallel_size
    return ServicePlan(
        settings=_with_defaults(overrides, "engine", _engine_defaults(settings.target_cpus, gpus, own_device=False)),
        needs=ServiceNeeds(settings.target_cpus, gpus, ranks=ranks),
        drain_seconds=settings.drain_seconds,
        count=settings.targets,
    )


def _draft_plan(settings: RaySettings, file: Path | None) -> ServicePlan:
    flags = draft_flags(settings, 1) | _RAYS_OWN
    if settings.draft_gpus < 1:
        flags["engine.gpu_memory_utilization"] = None  # the target's
    resources = _resources(settings.draft_resource)
    defaults = _engine_defaults(settings.draft_cpus, settings.draft_gpus, own_device=bool(resources))
    return ServicePlan(
        settings=_with_defaults(_overrides(DraftConfig, file, flags), "engine", defaults),
        needs=ServiceNeeds(settings.draft_cpus, settings.draft_gpus, resources),
        drain_seconds=settings.drain_seconds,
        count=settings.drafts,
    )


def _coordinator_plan(settings: RaySettings, file: Path | None) -> ServicePlan:
    draft = UNKNOWN_PEER if settings.draft_models else None
    flags = coordinator_flags(settings, UNKNOWN_PEER, draft)
    flags |= _RAYS_OWN | {"server.host": settings.host or None}
    return ServicePlan(
        settings=_overrides(CoordinatorConfig, file, flags),
        needs=ServiceNeeds(settings.coordinator_cpus),
        drain_seconds=settings.drain_seconds,
        count=settings.coordinators,
        serving_port=settings.port,
    )


def _gateway_plan(settings: RaySettings) -> ServicePlan:
    flags = gateway_flags(settings, UNKNOWN_PEER) | {"server.port": None}
    if not settings.tls:  # with it, it's this machine's alone
        flags["server.host"] = settings.host or None
    return ServicePlan(
        settings=_overrides(GatewayConfig, None, flags),
        needs=ServiceNeeds(0.0),
        drain_seconds=settings.drain_seconds,
        count=settings.gateways,
        serving_port=settings.http_port,
    )


def _overrides(kind: type[Settings], file: Path | None, flags: Flags) -> dict[str, object]:
    """The settings that file and flags give, checked as the service checks them."""
    overrides: dict[str, object] = load_config(kind, file, flags).model_dump(mode="json", exclude_unset=True)
    return overrides


def _engine_defaults(cpus: float, gpus: float, *, own_device: bool) -> dict[str, object]:
    """Engine settings that follow from what Ray reserves for one process.

    `own_device`: the plan has a resource of the user's own, which may stand for a device that the engine finds.
    """
    defaults: dict[str, object] = {"threads": max(1, int(cpus))}
    if gpus == 0 and not own_device:
        defaults["device"] = "cpu"
    if 0 < gpus < 1:
        defaults["gpu_memory_utilization"] = _GPU_SHARE * gpus
    return defaults


def _with_defaults(settings: dict[str, object], name: str, defaults: Mapping[str, object]) -> dict[str, object]:
    section = settings.get(name, {})
    assert isinstance(section, dict)
    return {**settings, name: {**defaults, **section}}


def _resources(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    match = _RESOURCE.fullmatch(text)
    if match is None:
        raise InvalidInput.of("draft_resource", text, "NAME=AMOUNT")
    amount = float(match["amount"])
    require(amount > 0, "draft_resource", text, "NAME=AMOUNT with an amount above 0")
    return {match["name"]: amount}
