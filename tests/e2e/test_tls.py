"""Three processes under mutual TLS: certificates change under load, and a foreign role gets nowhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.client import AsyncClient
from paceline.local.certificates import write_certificates
from paceline.local.settings import ServeSettings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.generation import GenerateRequest
from paceline.runtime.config import PeerSettings
from paceline.runtime.roles import PeerRole
from tests.drafting.foreign_server import client_of
from tests.e2e.cluster import Cluster, full
from tests.rpc.shown import shown_certificate
from tests.services.harness import eventually

HOUR = timedelta(hours=1)
STEP = ",step_ms=2"
TARGET = f"table:vocab=64,seed=1{STEP}"
NEAR = "table:vocab=64,seed=1,noise=0.3"
WORKERS = 4
REQUESTS_BETWEEN = 8


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    write_certificates(folder, lifetime=HOUR)
    return folder


@pytest.fixture(scope="module")
def secured(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("secured"), TARGET, (f"model:{NEAR}",), tls=certificates) as running:
        yield running


def as_role(cluster: Cluster, role: PeerRole | None, label: str) -> PeerSettings:
    """How somebody of a role reaches a service; without a role: with no certificate."""
    reached = cluster.reach(label)
    assert cluster.tls is not None
    names = ("crt", "key")
    certificate, key = (None, None) if role is None else (cluster.tls / f"{role}.{name}" for name in names)
    return reached.model_copy(update={"tls_certificate": certificate, "tls_key": key})


def request(number: int) -> GenerateRequest:
    return GenerateRequest(token_ids=(1, number % 64), seed=number % 5, max_new_tokens=32)


def log_of(cluster: Cluster, label: str) -> str:
    return cluster.processes[label].log_file.read_text()


def serials(cluster: Cluster, folder: Path) -> dict[str, tuple[int, int]]:
    """For each service the serial number that a new connection is shown, and that of the file."""
    found = {}
    for label in cluster.processes:
        file = x509.load_pem_x509_certificate((folder / f"{label}.crt").read_bytes())
        found[label] = shown_certificate(cluster.reach(label)).serial_number, file.serial_number
    return found


@pytest.mark.parametrize("rotations", [2, full(60)])
async def test_rotation_under_load_loses_and_changes_nothing(
    secured: Cluster, certificates: Path, rotations: int
) -> None:
    peer = as_role(secured, PeerRole.CLIENT, "coordinator")
    async with AsyncClient(peer) as client:
        expected = [(await client.generate(request(number))).token_ids for number in range(10)]
    before, links = serials(secured, certificates), log_of(secured, "coordinator").count("link up: ")
    done = [0] * WORKERS
    stop = asyncio.Event()

    async def work(worker: int) -> None:
        while not stop.is_set():
            number = (worker + WORKERS * done[worker]) % len(expected)
            # A connection of its own for each request: each sees a handshake.
            async with AsyncClient(peer, resume_wait_s=0) as each:
                assert (await each.generate(request(number))).token_ids == expected[number]
            done[worker] += 1

    async with asyncio.TaskGroup() as group, AsyncClient(peer) as through:
        for worker in range(WORKERS):
            group.create_task(work(worker))
        for _ in range(rotations):
            await asyncio.to_thread(write_certificates, certificates, lifetime=HOUR)
            goal = sum(done) + REQUESTS_BETWEEN
            async with asyncio.timeout(60):
                while sum(done) < goal:
                    assert (await through.generate(request(3))).token_ids == expected[3]
        stop.set()
    shown = serials(secured, certificates)
    assert all(now == written for now, written in shown.values())
    assert all(shown[label] != before[label] for label in shown)
    assert log_of(secured, "coordinator").count("link up: ") == links, "no link was dropped"
    assert "TLS files read again: section=server" in log_of(secured, "coordinator")


@pytest.mark.parametrize(("role", "heard"), [(PeerRole.COORDINATOR, True), (PeerRole.CLIENT, False)])
async def test_a_server_that_is_not_ours_has_drafts_as_a_coordinator(
    secured: Cluster, role: PeerRole, heard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    label = next(label for label in secured.processes if "draft" in label)
    settings = as_role(secured, role, label).model_dump(include={"tls_ca", "tls_certificate", "tls_key"})
    address = str(secured.reach(label).address)
    async with client_of(address, vocab=64, draft={"address": address, **settings}) as client:
        await eventually(lambda: client.is_up or "reason=PERMISSION_DENIED" in caplog.text, "an answer")
        assert client.is_up == heard, caplog.text


def paceline(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "250", "TERM": "dumb"}).invoke(app, arguments)


def files_of(folder: Path, role: PeerRole) -> list[str]:
    certificate, key = str(folder / f"{role}.crt"), str(folder / f"{role}.key")
    return ["--tls-ca", str(folder / "ca.crt"), "--tls-certificate", certificate, "--tls-key", key]


def test_serve_generate_and_doctor_take_the_files(certificates: Path, tmp_path: Path) -> None:
    settings = ServeSettings(
        model=TARGET, drafter=f"model:{NEAR}", port=0, target_port=0, draft_port=0, tls=certificates
    )
    with SupervisedServices(settings, tmp_path) as services:
        asked = ["generate", "--coordinator", services.address, "--prompt", "hi", "--max-new-tokens", "4", "--json"]
        result = paceline(*asked, *files_of(certificates, PeerRole.CLIENT))
        assert result.exit_code == 0, result.output
        assert len(json.loads(result.output)["token_ids"]) == 4
        named = ["--tls-server-name", PeerRole.COORDINATOR.server_name]
        assert paceline(*asked, *files_of(certificates, PeerRole.CLIENT), *named).exit_code == 0
        refused = paceline(*asked, *files_of(certificates, PeerRole.DRAFT))
        assert refused.exit_code == 1
        assert "must be client or operator" in refused.output
        refused = paceline(*asked, *files_of(certificates, PeerRole.CLIENT), "--tls-server-name", "elsewhere")
        assert "lacks the DNS name that is expected of it" in refused.output
        addresses = [part for label in services.processes for part in (f"--{label}", services.address_of(label))]
        result = paceline("doctor", *addresses, *files_of(certificates, PeerRole.OPERATOR))
        for words in ("all is well", "target steps", "draft steps", "ms of 1, "):
            assert words in result.output, result.output
        assert "not well" in paceline("doctor", *addresses, *files_of(certificates, PeerRole.CLIENT)).output
