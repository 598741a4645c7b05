"""Every setting of every service: typed, bounded, frozen, documented here and nowhere else.

Values come from a TOML file, overridden by command-line flags (each flag also
reads its `PACELINE_…` environment variable; the CLI does that, nothing below it
reads the environment). Unknown keys fail, naming the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import AUTO
from paceline.protocol.target import LIFE_SIGN_MS

DEFAULT_MODEL = "smollm2-135m"
FAST_DTYPE: Literal["fast"] = "fast"
COORDINATOR_PORT = 50051
DRAFT_PORT = 50052
TARGET_PORT = 50053
LOCALHOST = "127.0.0.1"

Port = Annotated[int, Field(ge=0, le=65535)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ServerSettings(_Settings):
    """What every gRPC server of ours needs; port 0 takes a free one."""

    host: str = LOCALHOST
    port: Port = 0
    health_port: Port | None = Field(None, description="A second, plaintext port for grpc.health.v1 alone.")
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = Field(None, description="Require client certificates signed by this CA.")
    drain_seconds: float = Field(5.0, ge=0, le=600, description="Time that running sessions get on SIGTERM.")
    port_file: Path | None = Field(None, description="Written with host:port once the server is SERVING.")


class PeerSettings(_Settings):
    """How to reach a peer."""

    address: str
    tls_ca: Path | None = Field(None, description="Trust this CA and use TLS; unset: plaintext.")
    tls_certificate: Path | None = None
    tls_key: Path | None = None


class EngineSettings(_Settings):
    """How a model is loaded and what it may hold."""

    dtype: Literal["auto", "fast", "float32", "bfloat16", "float16"] = Field(
        "auto", description="fast, for drafts: on CPUs weights of 8 bits or bfloat16, where auto is float32."
    )
    device: str = "auto"
    threads: int = Field(0, ge=0, le=1024, description="Compute threads; 0: every core.")
    max_model_len: int = Field(0, ge=0, le=1 << 22, description="Longest session in tokens; 0: the model's own.")
    max_num_seqs: int = Field(256, ge=1, le=65536, description="Most sessions open at once.")
    kv_bytes: int = Field(
        0, ge=0, description="KV budget of each rank; 0: from gpu_memory_utilization, or 2 GiB on a CPU."
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    prefill_chunk: int = Field(128, ge=1, le=65536, description="Most prompt tokens in one step.")
    max_step_rows: int = Field(
        1024, ge=128, le=1 << 20, description="Most rows of one step; further rounds wait for the next."
    )
    prefix_reuse: bool = Field(True, description="Compute a prefix that sessions share once.")
    reproducible: bool = Field(False, description="Fixed shapes: the same bits whatever runs beside a session.")
    reproducible_rows: int = Field(
        16, ge=8, le=64, multiple_of=8, description="Rows of a reproducible step; others are padded or cut to it."
    )
    cuda_graphs: bool = Field(True, description="Capture each shape of a step on a GPU once, and replay it.")
    trust_remote_code: bool = False


class TargetConfig(_Settings):
    """The target service."""

    model: str = DEFAULT_MODEL
    server: ServerSettings = ServerSettings(port=TARGET_PORT)
    engine: EngineSettings = EngineSettings()
    tensor_parallel_size: int = Field(
        1, ge=1, le=1024, description="Ranks that share the model: a divisor of its heads and KV heads."
    )
    max_queue: int = Field(
        1024, ge=1, le=1 << 20, description="Most sessions waiting for room before RESOURCE_EXHAUSTED."
    )
    step_timeout_ms: float = Field(
        120_000.0, gt=0, description="A step that takes longer hangs: coordinators see no more life in the target."
    )


class DraftConfig(_Settings):
    """The draft service. Drafters are `model:NAME`, the default first; `model:default` comes with Paceline."""

    drafters: tuple[str, ...] = ("model:default",)
    target_model: str | None = Field(None, description="Target whose tokenizer the drafters must share.")
    server: ServerSettings = ServerSettings(port=DRAFT_PORT)
    engine: EngineSettings = EngineSettings(dtype=FAST_DTYPE)

    @field_validator("engine", mode="before")
    @classmethod
    def _fast_unless_told(cls, value: object) -> object:
        """A draft's precision changes speed only, so what no setting names is what is fast."""
        return {"dtype": FAST_DTYPE} | value if isinstance(value, dict) else value

    @field_validator("engine")
    @classmethod
    def _not_reproducible(cls, engine: EngineSettings) -> EngineSettings:
        if engine.reproducible:
            raise ValueError("a draft's bits change no text; reproducible is the target's")
        return engine


class CoordinatorConfig(_Settings):
    """The coordinator. `draft` unset: every round is target-only."""

    model: str = Field(DEFAULT_MODEL, description="Names the tokenizer; must be the target's.")
    served_model_name: str | None = None
    server: ServerSettings = ServerSettings(port=COORDINATOR_PORT)
    target: PeerSettings = PeerSettings(address=f"{LOCALHOST}:{TARGET_PORT}")
    draft: PeerSettings | None = None
    drafter: str = Field(AUTO, description="auto, ngram, or a drafter of the draft service.")
    num_draft_tokens: int | None = Field(
        None, ge=0, le=64, description="Tokens to propose in each round; unset: the policy chooses."
    )
    fan_out: int = Field(
        4, ge=0, le=64, description="Next tokens per accepted node to draft for while a round is verified; 0: none."
    )
    lease: int = Field(
        16, ge=0, le=64, description="Most rounds the target may begin by itself where nothing is proposed; 0: none."
    )
    max_prefetched: int = Field(
        24, ge=0, le=64, description="Most proposals left with the target for one round's outcomes; 0: none."
    )
    seed: int | None = Field(None, ge=0, lt=1 << 64, description="Seed of requests that bring none; unset: drawn.")
    max_concurrent_requests: int = Field(1024, ge=1, le=1 << 20)
    draft_timeout_ms: float = Field(
        250.0, gt=0, description="Longest wait for a proposal before a target-only round."
    )
    round_timeout_ms: float = Field(
        30_000.0,
        ge=2 * LIFE_SIGN_MS,
        description="A target silent for so long is treated as dead; a busy one shows life every 250 ms.",
    )
    target_wait_ms: float = Field(30_000.0, ge=0, description="Longest wait for a dead target to come back.")
    reconnect_min_ms: float = Field(50.0, gt=0)
    reconnect_max_ms: float = Field(2_000.0, gt=0)


Config = TypeVar("Config", bound=_Settings)


def load_config(kind: type[Config], file: Path | None, flags: Mapping[str, object]) -> Config:
    """Merge a TOML file and flags (dotted keys, `None` means not given) into one config.

    Raises:
        InvalidInput: naming the key, its value and the limit.
    """
    values: dict[str, object] = {}
    if file is not None:
        values = _read_toml(file)
    for dotted, value in flags.items():
        if value is not None:
            _set_dotted(values, dotted.split("."), value)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InvalidInput.of(key, first["input"], f"valid ({first['msg']})") from error


def _read_toml(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput.of("config", str(file), f"a readable TOML file ({error})") from error


def _set_dotted(values: dict[str, object], keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        inner = values.setdefault(key, {})
        if not isinstance(inner, dict):
            raise InvalidInput.of(key, inner, "a table")
        values = inner
    values[keys[-1]] = value
