"""`paceline serve` and its gateway: opened, restarted, gone on without, or insisted on."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.local import supervisor
from paceline.local.service_process import ServiceRefused, of_services
from paceline.local.settings import ServeSettings, gateway_flags
from paceline.local.supervisor import SupervisedServices
from paceline.runtime.config import LOCALHOST, PoolSettings
from paceline.runtime.gateway_config import GatewayConfig
from tests.gateway.gateways import post, request
from tests.warm import PACELINE

MODEL = "table:vocab=300,seed=1"
PORTS = {"port": 0, "draft_port": 0, "target_port": 0}
COMPLETION = {"prompt": "a", "max_tokens": 3, "seed": 1}


def settings(**changes: object) -> ServeSettings:
    return ServeSettings.model_validate({"model": MODEL, "drafter": "none", **PORTS} | changes)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((LOCALHOST, 0)) as listener:
        yield listener.getsockname()[1]


def test_serve_opens_http_and_says_so(tmp_path: Path) -> None:
    flags = [word for port in (*PORTS, "http_port") for word in (f"--{port.replace('_', '-')}", "0")]
    command = [*PACELINE, "serve", MODEL, "--drafter", "none", *flags, "--log-dir", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        said = next(line for line in iter(child.stdout.readline, "") if line.startswith("OpenAI's API: http://"))
        address = said.split("http://")[1].removesuffix("/v1\n")
        assert post(address, "/v1/completions", COMPLETION).status == 200
        assert request(address, "GET", "/v1/models", None, {}).json["data"][0]["id"] == MODEL
    finally:
        child.terminate()
        child.communicate(timeout=30)
    assert child.returncode == 0
    assert "stopped: address=" in (tmp_path / "gateway.log").read_text()


class OnlyHttp(SupervisedServices):
    """Nothing but the gateway."""

    address = "127.0.0.1:1"

    def start_all(self) -> None:
        self._open_http()


@pytest.fixture(params=["a port that is taken", "packages that are missing"])
def impediment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is said of it."""
    if "packages" not in request.param:
        return "server address = "
    monkeypatch.setattr(supervisor, "missing_packages", lambda: ["fastapi"])
    return "HTTP needs fastapi: pip install 'paceline[http]'"


def test_services_go_on_without_http_that_nobody_asked_for(tmp_path: Path, taken: int, impediment: str) -> None:
    by_default = settings(http_port=taken)
    by_default.model_fields_set.discard("http_port")
    lines: list[str] = []
    with OnlyHttp(by_default, tmp_path, lines.append) as running:
        assert running.http_address is None
        assert running.processes == {}
    (line,) = lines
    assert line.startswith("gateway ")
    assert impediment in line


def test_http_that_was_asked_for_is_insisted_on(tmp_path: Path, taken: int, impediment: str) -> None:
    with pytest.raises(ServiceRefused) as caught, OnlyHttp(settings(http_port=taken), tmp_path):
        pass
    assert impediment in caught.value.message


def test_http_is_for_this_machine_alone_where_services_demand_certificates() -> None:
    open_to_all = settings(host="0.0.0.0")
    assert gateway_flags(open_to_all, "c:1")["server.host"] == "0.0.0.0"
    under_tls = gateway_flags(settings(host="0.0.0.0", tls="/certs"), "c:1")
    assert under_tls["server.host"] == LOCALHOST
    assert str(under_tls["peer_certificate"]).endswith("client.crt")


def test_a_coordinator_that_is_shown_a_certificate_must_show_its_role(tmp_path: Path) -> None:
    plain = GatewayConfig().reach("10.0.0.1:50051", "found")
    assert (plain.server_name, plain.tls_ca, plain.tls_certificate) == ("found", None, None)
    files = {f"peer_{name}": tmp_path / name for name in ("ca", "certificate", "key")}
    mutual = GatewayConfig(**files).reach("10.0.0.1:50051", "found")
    assert mutual.server_name == "coordinator.paceline"
    assert (mutual.tls_ca, mutual.tls_certificate, mutual.tls_key) == tuple(files.values())
    named = PoolSettings(address=("x:1",), server_name="mine")
    assert GatewayConfig(coordinator=named, **files).reach("x:1").server_name == "mine"


def test_variables_of_a_gateway_alone_are_not_read_by_serve() -> None:
    assert of_services({"PACELINE_GATEWAY_MODEL": "m"}) == ["PACELINE_GATEWAY_MODEL"]


def test_the_gateway_command_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.services.missing_packages", lambda: ["uvicorn"])
    result = CliRunner().invoke(app, ["gateway", "--model", MODEL])
    said = "paceline: error: `paceline gateway` needs uvicorn: pip install 'paceline[http]'\n"
    assert (result.exit_code, result.stderr) == (1, said)
