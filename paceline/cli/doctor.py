"""`paceline doctor`: what is installed and cached, which services answer, and whether they fit together."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field
from rich.console import Console

from paceline.cli.app import EXIT_ERROR, app
from paceline.cli.request_options import API_KEY_VARIABLE, RoleTlsOptions, read_api_key
from paceline.cli.support import example, has_engine
from paceline.client import DEFAULT_ADDRESS, Client
from paceline.costs.service_costs import TargetCosts
from paceline.models.pullable import PULLABLE
from paceline.models.resolve import is_pulled, model_home
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import ModelDescription
from paceline.protocol.handshake import ServiceStatus
from paceline.protocol.proposal import NONE
from paceline.rpc.channel import open_sync_channel
from paceline.rpc.link_kinds import service_costs, service_status
from paceline.rpc.statuses import from_rpc_error
from paceline.runtime.config import DRAFT_PORT, LOCALHOST, TARGET_PORT, PeerSettings
from paceline.runtime.llama_settings import LlamaSettings
from paceline.runtime.logs import one_line
from paceline.runtime.options import takes_settings
from paceline.runtime.roles import PeerRole

BASE_PACKAGES = ("grpcio", "protobuf", "pydantic", "rich", "typer")
ENGINE_PACKAGES = ("torch", "transformers", "numpy", "numba", "safetensors", "gguf")
ROUND_TRIPS = 20
SHOWN_DIGITS = 12

DEFAULT_DRAFT = f"{LOCALHOST}:{DRAFT_PORT}"
DEFAULT_TARGET = f"{LOCALHOST}:{TARGET_PORT}"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `ok` is None for a fact that is neither good nor bad."""

    subject: str
    detail: str
    ok: bool | None = None


class DoctorOptions(RoleTlsOptions):
    """The services to ask."""

    coordinator: str = Field(DEFAULT_ADDRESS, description="HOST:PORT of the coordinator.")
    draft: str = Field(DEFAULT_DRAFT, description="HOST:PORT of the draft service, or none.")
    target: str = Field(DEFAULT_TARGET, description="HOST:PORT of the target service.")
    api_key_file: Path | None = Field(
        None, description=f"A file with the API key alone; unset: the variable {API_KEY_VARIABLE}."
    )
    timeout: float = Field(3.0, description="Seconds to wait for each answer.")

    @property
    def expects_draft(self) -> bool:
        """Whether there should be a draft service."""
        return self.draft not in ("", NONE)


@app.command(epilog=example("paceline doctor", f"paceline doctor --coordinator {DEFAULT_ADDRESS} --draft none"))
@takes_settings(DoctorOptions)
def doctor(**flags: Any) -> None:
    """Check versions, devices, models and services; the exit code says whether all is well."""
    console = Console(soft_wrap=True)
    marks = {True: "[green]ok[/green]  ", False: "[red]BAD[/red] ", None: "    "}
    is_well = True
    for finding in examine(DoctorOptions(**flags)):
        is_well &= finding.ok is not False
        console.print(f"{marks[finding.ok]} [bold]{finding.subject:<22}[/bold]", end="")
        console.print(one_line(finding.detail), markup=False, highlight=False)
    console.print("all is well" if is_well else "not well: see the lines marked BAD")
    raise typer.Exit(0 if is_well else EXIT_ERROR)


def examine(options: DoctorOptions) -> Iterator[Finding]:
    """Yield the findings in order."""
    api_key = read_api_key(options.api_key_file)
    yield from _versions()
    yield from _models()
    statuses: list[ServiceStatus] = []
    yield from _worker("target", options, options.target, statuses)
    if options.expects_draft:
        yield from _worker("draft", options, options.draft, statuses)
    yield from _coordinator(options, api_key)
    yield from _tokenizers(statuses)


def _versions() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    yield Finding("paceline", _version("paceline"), ok=True)
    yield Finding("packages", ", ".join(f"{package} {_version(package)}" for package in BASE_PACKAGES))
    if not has_engine():
        yield Finding("engine", "not installed: this is a client (pip install 'paceline[engine]' to serve)")
        return
    yield Finding("engine", ", ".join(f"{package} {_version(package)}" for package in ENGINE_PACKAGES), ok=True)
    yield Finding("devices", _devices())
    yield Finding("between ranks", _backends())
    yield Finding("llama.cpp", _llama())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _devices() -> str:
    import torch

    devices = [f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} torch threads)"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} {properties.name} ({properties.total_memory >> 30} GiB)")
    return ", ".join(devices)


def _backends() -> str:
    """The backends over which the ranks of a tensor-parallel target can communicate."""
    from torch import distributed

    if not distributed.is_available():
        return "nothing: this torch is built without distributed"
    backends = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    return ", ".join(name for name, available in backends.items() if available) or "nothing"


def _llama() -> str:
    """llama.cpp's library, its build and its devices, or why there is none."""
    from paceline.engine.llama.loading import at_hand

    return at_hand(LlamaSettings())


def _models() -> Iterator[Finding]:
    if not has_engine():
        return
    yield Finding("model cache", str(model_home()))
    for name in PULLABLE:
        yield Finding(f"model {name}", "pulled" if is_pulled(name) else f"not pulled (paceline pull {name})")


def _worker(
    name: Literal["target", "draft"], options: DoctorOptions, address: str, statuses: list[ServiceStatus]
) -> Iterator[Finding]:
    """Health, round trip and status of the target or draft service; adds its status if it has one."""
    health = _health(name, options, address)
    yield from health
    if not health[0].ok:
        return
    try:
        status = service_status(name, options.peer_of(PeerRole(name), address), options.timeout)
    except grpc.RpcError as error:
        yield Finding(f"{name} status", from_rpc_error(error).message, ok=False)
        return
    statuses.append(status)
    model, resident_mib = status.fingerprint.model or "no model", status.resident_bytes >> 20
    rows = f"{status.kv_rows} of {status.max_kv_rows} KV rows"
    yield Finding(f"{name} status", f"{model}, {status.sessions} sessions, {rows}, {resident_mib} MiB resident")
    yield from _steps(name, options.peer_of(PeerRole(name), address), options.timeout)


def _steps(name: Literal["target", "draft"], peer: PeerSettings, timeout_s: float) -> Iterator[Finding]:
    """A finding for each cost line of the service; the line beside a draft only if it differs."""
    try:
        costs = service_costs(name, peer, timeout_s)
    except PacelineError as error:
        yield Finding(f"{name} steps", error.message, ok=False)
        return
    if isinstance(costs, TargetCosts):
        lines = {"target steps": costs.alone}
        if costs.beside != costs.alone:
            lines["target beside a draft"] = costs.beside
    else:
        kinds = {False: "draft steps", True: "draft beside the target"}
        lines = {f"{kinds[beside]} {name}".rstrip(): line for (name, beside), line in costs.lines.items()}
    for subject, points in lines.items():
        times = ", ".join(f"{ms:.1f} ms of {rows:g}" for rows, ms in points.points)
        yield Finding(subject, f"{times} rows" if times else "not measured")


def _health(name: str, options: DoctorOptions, address: str) -> list[Finding]:
    with open_sync_channel(options.peer_of(PeerRole(name), address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        check = partial(stub.Check, health_pb2.HealthCheckRequest(), timeout=options.timeout)
        try:
            answer = check(wait_for_ready=True)
            trips = [_timed_ms(check) for _ in range(ROUND_TRIPS)]
        except grpc.RpcError as error:
            return [Finding(name, f"{address} does not answer: {from_rpc_error(error).message}", ok=False)]
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    round_trip = Finding(
        f"{name} round trip", f"{statistics.median(trips):.2f} ms, median of {ROUND_TRIPS} unary calls"
    )
    return [Finding(name, f"{address} is {state}", ok=state == "SERVING"), round_trip]


def _timed_ms(call: Any) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _coordinator(options: DoctorOptions, api_key: str | None) -> Iterator[Finding]:
    health = _health("coordinator", options, options.coordinator)
    yield from health
    if not health[0].ok:
        return
    try:
        peer, timeout_s = options.peer_of(PeerRole.COORDINATOR, options.coordinator), options.timeout
        with Client(peer, timeout_s=timeout_s, api_key=api_key) as client:
            models = client.describe_models()
    except PacelineError as error:
        yield Finding("models", error.message, ok=False)
        return
    for model in models:
        yield from _links(model, draft_expected=options.expects_draft)


def _links(model: ModelDescription, *, draft_expected: bool) -> Iterator[Finding]:
    drafters = ", ".join(model.drafters) or "none"
    yield Finding(f"served {model.name}", f"context {model.max_length} tokens, drafters: {drafters}")
    if defaults := ", ".join(f"{name} {value:g}" for name, value in model.defaults.items()):
        yield Finding("defaults of requests", f"{defaults}, as the model's generation_config.json has it")
    yield Finding("link to the target", "up" if model.target_ready else "down", ok=model.target_ready)
    if draft_expected:
        yield Finding("link to the draft", "up" if model.draft_ready else "down", ok=model.draft_ready)


def _tokenizers(statuses: list[ServiceStatus]) -> Iterator[Finding]:
    """An empty fingerprint fits any vocabulary (an n-gram drafter)."""
    fingerprints = {status.fingerprint.tokenizer for status in statuses if status.fingerprint.tokenizer}
    prefixes = ", ".join(sorted(fingerprint[:SHOWN_DIGITS] for fingerprint in fingerprints))
    if fingerprints:
        yield Finding("tokenizers", f"sha256 {prefixes}", ok=len(fingerprints) == 1)
