"""The images' recipe: linted, pinned, of one user; what it starts is what the services and their settings know."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline.runtime.config import CoordinatorConfig
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.options import parse_config
from tests.deploy.rendering import ROOT, parse
from tests.deploy.settings import COMMANDS, KINDS, SERVICES, Config
from tools import constraints
from tools.kubectl import kubectl, verify_digest

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = parse((DOCKER / "compose.yaml").read_text())[0]
ROLES = sorted(KINDS)
SERVING = {name: each for name, each in COMPOSE["services"].items() if name != "pull"}


def stages(dockerfile: str) -> dict[str, str]:
    """Each stage's instructions, by its name; the first line is its FROM."""
    parts = re.split(r"^(?=FROM )", dockerfile, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].rpartition(" AS ")[2]: part for part in parts}


def instruction(stage: str, name: str) -> Any:
    (found,) = re.findall(rf"^{name}\b[^\[\n]*(\[.*\])$", stage, re.MULTILINE)
    return json.loads(found)


def configure(role: str, arguments: list[str]) -> Config:
    with patch.object(sys, "argv", [role, *arguments]):
        return parse_config(KINDS[role], "")


def health_port(role: str, config: Config) -> int | None:
    """Where the role is asked for its health: the gateway has no port of its own for it."""
    return config.server.port if role == "gateway" else config.server.health_port


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, "--no-color", str(file)], capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing_here_and_something_in_a_bad_variant(tmp_path: Path) -> None:
    assert hadolint(DOCKER / "Dockerfile").stdout == ""
    bad = tmp_path / "Dockerfile"
    bad.write_text(re.sub(r"FROM debian:\S+", "FROM debian:latest", DOCKERFILE))
    assert "DL3007" in hadolint(bad).stdout


def test_everything_comes_from_one_base_that_is_pinned() -> None:
    bases = [part.splitlines()[0].split()[1] for part in stages(DOCKERFILE).values()]
    outside = [base for base in bases if base not in stages(DOCKERFILE)]
    assert len(outside) == 1
    assert re.fullmatch(r"debian:bookworm-slim@sha256:[0-9a-f]{64}", outside[0])


def test_what_runs_is_no_root_and_writes_to_a_volume() -> None:
    runtime = stages(DOCKERFILE)["runtime"]
    assert "\nUSER 10001:10001\n" in runtime
    assert "\nVOLUME /cache\n" in runtime
    for role in ROLES:
        assert stages(DOCKERFILE)[role].startswith(f"FROM runtime AS {role}\n")
        assert "USER" not in stages(DOCKERFILE)[role]
    assert "USER_ID=10001" in (DOCKER / "install.sh").read_text()


@pytest.mark.parametrize("role", ROLES)
def test_an_image_starts_its_service_and_asks_for_its_health(role: str) -> None:
    stage = stages(DOCKERFILE)[role]
    assert instruction(stage, "ENTRYPOINT") == ["paceline", COMMANDS[role]]
    config = configure(role, instruction(stage, "CMD"))
    assert config.server.host == "0.0.0.0"
    _, _, port, service = instruction(stage, "HEALTHCHECK")
    assert (int(port), service) == (health_port(role, config), SERVICES.get(role, "/health"))
    (exposed,) = re.findall(r"^EXPOSE (.*)$", stage, re.MULTILINE)
    assert exposed.split() == [str(each) for each in dict.fromkeys((config.server.port, int(port)))]


def test_the_context_is_the_packages_and_what_installs_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages < set(allowed)
    assert {project["project"]["readme"], *project["project"]["license-files"]} < set(allowed)
    assert all((ROOT / name).exists() for name in allowed)


def test_images_are_called_by_the_projects_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    files = [file for file in (ROOT / "deploy").rglob("*") if file.suffix in (".yaml", ".md")]
    tags = {file: re.findall(r"\b(\d+\.\d+\.\d+)-(?:cpu|cuda)\b", file.read_text()) for file in files}
    assert {tag for found in tags.values() for tag in found} == {version}, tags


def test_constraints_meet_every_requirement() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"]]
    needed += [each for extra in extras.values() for each in extra if not each.startswith("paceline[")]
    for requirement in map(Requirement, needed):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not pinned: python -m tools.constraints"
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


def test_scripts_parse_and_install_refuses_a_step_that_it_has_not() -> None:
    subprocess.run(["bash", "-n", str(DOCKER / "check.sh")], check=True)
    command = ["sh", str(DOCKER / "install.sh"), "everything"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "everything: is build-system, environment or run-system" in done.stderr


@pytest.mark.parametrize("name", SERVING)
def test_compose_starts_what_the_services_accept(name: str) -> None:
    service = SERVING[name]
    role = name.removesuffix("-gpu")
    config = configure(role, service["command"])
    assert config.server.host == "0.0.0.0"
    assert health_port(role, config) == int(instruction(stages(DOCKERFILE)[role], "HEALTHCHECK")[2])
    assert float(service["stop_grace_period"].removesuffix("s")) > config.server.drain_seconds
    assert service["build"]["target"] == role
    assert service["build"]["args"]["VARIANT"] == ("cuda" if name.endswith("-gpu") else "cpu")
    assert service["profiles"] == (["gpu"] if name.endswith("-gpu") else ["cpu"])


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_confines_every_container(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("suffix", ["", "-gpu"])
def test_compose_names_peers_of_the_same_profile_and_one_model(suffix: str) -> None:
    configs = {role: configure(role, SERVING[role + suffix]["command"]) for role in ROLES}
    coordinator = configs["coordinator"]
    assert isinstance(coordinator, CoordinatorConfig)
    assert coordinator.draft is not None
    for role, peer in (("target", coordinator.target), ("draft", coordinator.draft)):
        assert f"dns:///{role}{suffix}:{configs[role].server.port}" in str(peer.address)
    gateway = configs["gateway"]
    assert isinstance(gateway, GatewayConfig)
    assert gateway.coordinator.address == (f"dns:///coordinator{suffix}:{coordinator.server.port}",)
    assert len({gateway.model, coordinator.model, configs["target"].model, configs["draft"].target_model}) == 1  # type: ignore[union-attr]


def test_the_health_check_of_http_is_the_answers_status() -> None:
    """Where nothing listens, too."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response({"/health": 200, "/ill": 503}[self.path])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    def asks(path: str, healthy: bool) -> None:
        command = [sys.executable, str(DOCKER / "healthy.py"), str(server.server_address[1]), path]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert (done.returncode == 0) == healthy, done.stderr
        assert bool(done.stderr) != healthy

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asks("/health", True)
        asks("/ill", False)
        server.shutdown()
    asks("/health", False)


def test_kubectl_is_the_pinned_one_and_another_wheel_is_refused() -> None:
    done = subprocess.run([str(kubectl()), "version", "--client"], capture_output=True, text=True, check=True)
    assert re.search(r"Client Version: v1\.\d+", done.stdout)
    with pytest.raises(ValueError, match=r"has sha256 .*, not "):
        verify_digest(b"another wheel")


def test_constraints_follow_requirements_and_leave_builds_out() -> None:
    versions = constraints.pinned_versions()
    assert "pytest" in versions, "CI installs what a release of another project can't change"
    assert {"torch", "transformers", "grpcio", "llguidance", "opentelemetry-sdk"} <= versions.keys()
    assert "huggingface-hub" in versions, "a requirement of a requirement"
    assert "paceline" not in versions
    assert not {"pytest", "llguidance"} & constraints.pinned_versions(extras=("otel",)).keys()
    assert not any("+" in version for version in versions.values())


def test_folders_and_files_that_the_documents_apply_exist() -> None:
    text = "".join(file.read_text() for file in (ROOT / "deploy").rglob("*.md"))
    named = re.findall(r"(?:apply -k|-f) (deploy/\S+)", text)
    assert len(named) > 5
    assert not [path for path in named if not (ROOT / path).exists()]
