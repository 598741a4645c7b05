"""The settings of `paceline serve`, and those of each service that follow from them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from paceline.local.drafter_choice import DrafterChoice
from paceline.local.service_process import Flags
from paceline.local.tls import check_folder, peer_tls, server_tls
from paceline.protocol.errors import require
from paceline.protocol.given_files import json_value
from paceline.protocol.proposal import AUTO, MODEL, NGRAM, NONE, OWN_MTP
from paceline.runtime.config import (
    COORDINATOR_PORT,
    DEFAULT_MODEL,
    DRAFT_PORT,
    HTTP_PORT,
    LOCALHOST,
    NOT_QUANTIZED,
    TARGET_PORT,
    CoordinatorConfig,
    DraftConfig,
    Dtype,
    EngineName,
    ModelSettings,
    Port,
    Quantization,
    RankSettings,
    RequestSettings,
    StopSettings,
    TargetConfig,
    load_config,
)
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.process import own_cores
from paceline.runtime.roles import PeerRole
from paceline.runtime.sources import refusal

DRAFT_SHARE = 0.2
"""The draft's part of the GPU memory that `paceline serve` may take; chosen, not tuned: a draft is that small."""
_CORES_LIMIT = "target=N or target=N,draft=M"
_CORES = re.compile(r"target=(?P<target>\d{1,4})(,draft=(?P<draft>\d{1,4}))?")


@dataclass(frozen=True)
class Cores:
    """Compute threads of target and draft; draft 0: there is no draft service."""

    target: int
    draft: int

    @classmethod
    def parse(cls, text: str) -> Cores:
        """Read `target=N` or `target=N,draft=M`.

        Raises:
            InvalidInput: neither.
        """
        match = _CORES.fullmatch(text)
        require(match is not None, "cores", text, _CORES_LIMIT)
        assert match is not None, "required"
        return cls(int(match["target"]), int(match["draft"] or 0))

    def check(self, total: int, *, drafts: bool) -> None:
        """Refuse more cores than the machine has, and a draft's cores without a draft.

        Raises:
            InvalidInput: naming the service.
        """
        require(1 <= self.target <= total, "cores target", self.target, f"in [1, {total}], the cores of this process")
        if drafts:
            require(
                1 <= self.draft <= total, "cores draft", self.draft, f"in [1, {total}], the cores of this process"
            )
        else:
            require(self.draft == 0, "cores draft", self.draft, "left out: there is no draft service")

    def description(self, total: int) -> str:
        """The division in words."""
        if not self.draft:
            return f"target {self.target}"
        return (
            f"target {self.target} + draft {self.draft} {'shared' if self.target + self.draft > total else 'apart'}"
        )


def by_rule(total: int, *, drafts: bool) -> Cores:
    """Give the target all cores and the draft one of them: without a draft at work the target loses none."""
    return Cores(total, 1 if drafts else 0)


class ServeSettings(ModelSettings, RankSettings, RequestSettings, StopSettings):
    """Settings of `paceline serve`. The services decide those that are not set; port 0 takes a free one."""

    variables: ClassVar[str] = "PACELINE_SERVE_"

    model: str = Field(DEFAULT_MODEL, description="As MODEL: a pulled model, hub id, folder or .gguf file.")
    drafter: str = Field(
        AUTO, description="auto, ngram, model, mtp, none; auto:PATH, model:PATH: your own draft, PATH+PATH several."
    )
    dtype: Dtype = Field("auto", description="Number format of the target's weights.")
    engine: EngineName = Field("auto", description="What computes the target: llama.cpp, for .gguf files, or torch.")
    draft_engine: EngineName = Field("auto", description="What computes the draft, likewise.")
    quantization: Quantization = Field(
        NOT_QUANTIZED, description="int8: the target's weights in 8 bits; the text is that of the rounded model."
    )
    host: str = Field(LOCALHOST, description="Address that the coordinator listens on.")
    port: Port = Field(COORDINATOR_PORT, description="The coordinator's gRPC port; 0 takes a free one.")
    draft_port: Port = Field(DRAFT_PORT, description="The draft service's port.")
    target_port: Port = Field(TARGET_PORT, description="The target service's port.")
    http: bool = Field(True, description="Open OpenAI's API, too: an HTTP gateway in front of the coordinator.")
    http_port: Port = Field(HTTP_PORT, description="The gateway's port; 0 takes a free one.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65533,
        description="The coordinator's port for Prometheus; draft and target take the next two.",
    )
    vllm_metrics: bool = Field(False, description="Expose vLLM's names for metrics, too.")
    tls: Path | None = Field(
        None, description="Folder of role certificates (paceline certs): mutual TLS on every edge."
    )
    cores: str | None = Field(
        None, description="Compute threads: target=N, or target=N,draft=M with a draft; unset: all and 1."
    )
    max_restarts: int = Field(5, ge=0, le=1000, description="Restarts in a row of a service that ends by itself.")

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, values: object, check: ModelWrapValidatorHandler[ServeSettings]) -> ServeSettings:
        """Refuse as the services do.

        Raises:
            InvalidInput: naming field, value and limit.
        """
        try:
            settings = check(values)
        except ValidationError as error:
            raise refusal(error) from error
        DrafterChoice.parse(settings.drafter)
        if settings.cores is not None:
            Cores.parse(settings.cores)
        return settings

    @property
    def draft_models(self) -> tuple[str, ...]:
        """The models that the draft service loads, its default first; empty: no draft service."""
        return DrafterChoice.parse(self.drafter).draft_models(self.model)

    @property
    def insists_on_http(self) -> bool:
        """Whether a flag asks for HTTP: then the services don't run without it."""
        return self.http and not self.model_fields_set.isdisjoint(("http", "http_port"))

    @property
    def missing_draft(self) -> str | None:
        """The missing part of the draft that `auto` would choose, with the command that gets it; None: nothing."""
        return DrafterChoice.parse(self.drafter).missing_draft(self.model)


def local_settings(
    model: str, drafter: str, quantization: str = NOT_QUANTIZED, cores: str | None = None, **others: Any
) -> ServeSettings:
    """Settings of services for one command or measurement, on free ports; `others` by their names.

    Raises:
        InvalidInput: a setting that `paceline serve` would refuse.
    """
    values = {"model": model, "drafter": drafter, "quantization": quantization, "cores": cores}
    return ServeSettings(**values, **others, port=0, draft_port=0, target_port=0, http_port=0)


def missing_packages() -> list[str]:
    """Packages of the extra `http` that are not installed."""
    return [package for package in ("fastapi", "httptools", "uvicorn") if util.find_spec(package) is None]


def available_cores(environment: Mapping[str, str]) -> int:
    """Cores that this process may use, or fewer if OMP_NUM_THREADS says so."""
    cores = own_cores()
    limit = environment.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) > 0 else cores


def speculative_drafter(text: str) -> tuple[str, int | None]:
    """Read vLLM's `--speculative-config` JSON.

    Returns:
        The drafter as `--drafter` names it, and the tokens to propose if given.

    Raises:
        InvalidInput: not a JSON object, an unknown key or method, a missing model, or one that the method has no use
            for.
    """
    document = json_value("speculative_config", text)
    require(isinstance(document, dict), "speculative_config", text, "a JSON object")
    keys = ("method", "model", "num_speculative_tokens")
    for key, value in document.items():
        require(key in keys, f"speculative_config.{key}", value, f"left out; known keys: {', '.join(keys)}")
    tokens = document.get("num_speculative_tokens")
    tokens_ok = tokens is None or type(tokens) is int
    require(tokens_ok, "speculative_config.num_speculative_tokens", tokens, "an integer")
    return _method_drafter(document.get("method"), document.get("model")), tokens


_WITHOUT_MODEL = {AUTO: AUTO, NGRAM: NGRAM, "suffix": NGRAM, "mtp": OWN_MTP, NONE: NONE}
"""Drafters by method name; the suffix automaton searches for matches under both of its names."""
_WITH_MODEL = ("draft_model", "medusa", "eagle", "eagle3", "dflash")
"""Methods whose drafter is a model; its kind is read from its files."""


def _method_drafter(method: object, model: object) -> str:
    is_known = isinstance(method, str) and method in (*_WITHOUT_MODEL, *_WITH_MODEL)
    methods = ", ".join((*_WITHOUT_MODEL, *_WITH_MODEL))
    require(is_known, "speculative_config.method", method, f"one of {methods}")
    if method in _WITH_MODEL:
        has_model = isinstance(model, str) and model != ""
        require(has_model, "speculative_config.model", model, "the drafting model's name or path")
        return f"model:{model}"
    require(model is None, "speculative_config.model", model, f"left out with method {method}")
    return _WITHOUT_MODEL[str(method)]


def target_flags(settings: ServeSettings, threads: int) -> Flags:
    """The target service's settings, dotted keys as in `TargetConfig`."""
    return {
        **_fields_set(settings, ModelSettings, "engine."),
        **_fields_set(settings, RankSettings),
        **_fields_set(settings, StopSettings, "server."),
        "engine.engine": _if_set(settings, "engine"),
        "engine.dtype": settings.dtype,
        "engine.quantization": settings.quantization,
        "engine.threads": threads,
        "model": settings.model,
        "server.port": settings.target_port,
        **_metrics(settings, 2),
        **server_tls(settings.tls, PeerRole.TARGET),
    }


def gpu_shares(settings: ServeSettings) -> tuple[Flags, Flags]:
    """The settings by which a target and a draft on one machine divide its GPU's memory."""
    draft = DRAFT_SHARE if settings.draft_models else 0.0
    target: Flags = {"engine.gpu_memory_utilization": round(settings.gpu_memory_utilization * (1 - draft), 4)}
    drafting: Flags = {"engine.gpu_memory_utilization": round(settings.gpu_memory_utilization * draft, 4)}
    return target, drafting


def draft_flags(settings: ServeSettings, threads: int) -> Flags:
    """The draft service's settings, dotted keys as in `DraftConfig`; it keeps its own precision."""
    return {
        **_fields_set(settings, ModelSettings, "engine."),
        **_fields_set(settings, StopSettings, "server."),
        "engine.engine": _if_set(settings, "draft_engine"),
        "engine.reproducible": None,
        "engine.threads": threads,
        "drafters": [f"{MODEL}:{model}" for model in settings.draft_models],
        "target_model": settings.model,
        "server.port": settings.draft_port,
        **_metrics(settings, 1),
        **server_tls(settings.tls, PeerRole.DRAFT),
    }


def coordinator_flags(settings: ServeSettings, target: str, draft: str | None) -> Flags:
    """The coordinator's settings, dotted keys as in `CoordinatorConfig`."""
    return {
        **_fields_set(settings, RequestSettings),
        **_fields_set(settings, StopSettings, "server."),
        "model": settings.model,
        "drafter": DrafterChoice.parse(settings.drafter).kind,
        "server.host": settings.host,
        "server.port": settings.port,
        **_metrics(settings, 0),
        "target.address": target,
        "draft.address": draft,
        **server_tls(settings.tls, PeerRole.COORDINATOR),
        **peer_tls(settings.tls),
    }


def gateway_flags(settings: ServeSettings, coordinator: str) -> Flags:
    """The gateway's settings, dotted keys as in `GatewayConfig`.

    HTTP has no certificates here. If the services demand certificates, HTTP is open to this machine alone.
    """
    return {
        **_fields_set(settings, StopSettings, "server."),
        "model": settings.model,
        "server.host": LOCALHOST if settings.tls else settings.host,
        "server.port": settings.http_port,
        "server.vllm_metrics": settings.vllm_metrics or None,
        "coordinator.address": coordinator,
        **peer_tls(settings.tls, PeerRole.CLIENT),
    }


def _metrics(settings: ServeSettings, place: int) -> Flags:
    """The metrics settings of a service, whose port is `place` after the coordinator's; 0 takes any port."""
    port = settings.metrics_port
    return {
        "server.metrics_port": port + place if port else port,
        "server.vllm_metrics": settings.vllm_metrics or None,
    }


def _if_set(settings: ServeSettings, field: str) -> object:
    """A setting's value; None where the service is to decide: another version's may not know it."""
    return getattr(settings, field) if field in settings.model_fields_set else None


def _fields_set(settings: ServeSettings, kind: type[BaseModel], section: str = "") -> Flags:
    """The set fields of a base type, those of its sections by their own keys."""
    values = {name: getattr(settings, name) for name in kind.model_fields.keys() & settings.model_fields_set}
    sections = {name: value for name, value in values.items() if isinstance(value, BaseModel)}
    flags: dict[str, Any] = {section + name: value for name, value in values.items() if name not in sections}
    for name, value in sections.items():
        flags |= {f"{section}{name}.{key}": each for key, each in value.model_dump(exclude_unset=True).items()}
    return flags


def check_settings(settings: ServeSettings) -> None:
    """Validate every service's configuration before a process starts.

    Raises:
        InvalidInput: naming key, value and limit.
    """
    check_folder(settings.tls)
    load_config(TargetConfig, None, target_flags(settings, 1))
    if settings.draft_models:
        load_config(DraftConfig, None, draft_flags(settings, 1))
    load_config(CoordinatorConfig, None, coordinator_flags(settings, "checked:1", None))
    load_config(GatewayConfig, None, gateway_flags(settings, "checked:1"))
    if settings.cores is not None:
        drafts = bool(settings.draft_models)
        Cores.parse(settings.cores).check(available_cores(os.environ), drafts=drafts)
