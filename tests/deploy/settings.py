"""What a rendered pod is configured with: flags, ConfigMap and environment, read by the program itself."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import coordinator.__main__ as coordinator_main
import draft_service.__main__ as draft_main
import target_service.__main__ as target_main
from paceline.runtime.config import CoordinatorConfig, DraftConfig, ServerSettings, TargetConfig
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.options import parse_config
from tests.deploy.rendering import Object, Workload, of_kind

Config = TargetConfig | DraftConfig | CoordinatorConfig | GatewayConfig
KINDS: dict[str, type[Config]] = {
    "target": TargetConfig,
    "draft": DraftConfig,
    "coordinator": CoordinatorConfig,
    "gateway": GatewayConfig,
}
SERVICES = {"target": target_main.SERVICE, "draft": draft_main.SERVICE, "coordinator": coordinator_main.SERVICE}
"""By role, what grpc.health.v1 knows; the gateway speaks HTTP."""
COMMANDS = {"target": "target-service", "draft": "draft-service", "coordinator": "coordinator", "gateway": "gateway"}
MODULE = "target_service"
"""What torchrun runs, which then takes the service's own flags."""


def settings(workload: Workload, objects: list[Object]) -> Config:
    """The configuration with which the service would start.

    Raises:
        InvalidInput: the service would refuse it.
        LookupError: a file that it names is not mounted, or it is no command of ours.
    """
    flags = [each.partition("=") for each in _own_arguments(workload)]
    files = {value: _mounted(Path(value), workload, objects) for flag, _, value in flags if flag == "--config"}
    variables = environment(workload)
    return _parsed(workload.role, tuple(map("".join, flags)), tuple(files.items()), tuple(variables.items()))


@cache
def _parsed(
    role: str, arguments: tuple[str, ...], files: tuple[tuple[str, str], ...], variables: tuple[tuple[str, str], ...]
) -> Config:
    """What a program makes of its flags, the files that they name, and its environment."""
    with tempfile.TemporaryDirectory() as folder:
        own = [role, *arguments]
        for number, (path, text) in enumerate(files):
            copy = Path(folder) / str(number)
            copy.write_text(text)
            own = [f"--config={copy}" if each == f"--config={path}" else each for each in own]
        with patch.object(sys, "argv", own), patch.dict(os.environ, dict(variables)):
            return parse_config(KINDS[role], "")


def server(workload: Workload, objects: list[Object]) -> ServerSettings:
    return settings(workload, objects).server


def environment(workload: Workload) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in workload.container.get("env", [])}


def launcher_flags(workload: Workload) -> dict[str, str]:
    """torchrun's own flags; empty where the service is started directly."""
    container = workload.container
    if container.get("command") != ["torchrun"]:
        return {}
    own = container["args"][: container["args"].index(MODULE)]
    return dict(each.removeprefix("--").split("=", 1) for each in own if "=" in each)


def _own_arguments(workload: Workload) -> list[str]:
    container = workload.container
    command, arguments = container["command"], list(container["args"])
    if command == ["paceline", COMMANDS[workload.role]]:
        return arguments
    if command == ["torchrun"] and MODULE in arguments:
        return arguments[arguments.index(MODULE) + 1 :]
    raise LookupError(f"{workload.name}: {command} is no command of the role {workload.role}")


def _mounted(path: Path, workload: Workload, objects: list[Object]) -> str:
    data = config_map(workload, objects, str(path.parent))
    if path.name not in data:
        raise LookupError(f"{workload.name}: {path} is not in the ConfigMap that is mounted there")
    return data[path.name]


def config_map(workload: Workload, objects: list[Object], mount_path: str) -> dict[str, str]:
    """What the ConfigMap that is mounted there holds."""
    mounts = {mount["mountPath"]: mount["name"] for mount in workload.container["volumeMounts"]}
    volumes: dict[str, Any] = {volume["name"]: volume for volume in workload.spec["volumes"]}
    try:
        name = volumes[mounts[mount_path]]["configMap"]["name"]
    except KeyError as error:
        raise LookupError(f"{workload.name}: no ConfigMap is mounted at {mount_path}") from error
    found = [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"] == name]
    if not found:
        raise LookupError(f"{workload.name}: there is no ConfigMap {name}")
    data: dict[str, str] = found[0]["data"]
    return data
