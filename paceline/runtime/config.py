"""Every setting of every service: typed, bounded, frozen, documented here and nowhere else.

Values come from a TOML file, overridden by variables (`paceline.runtime.options`),
overridden by command-line flags (`paceline.runtime.options`). All are made from
these types: a field's name, default, bounds and description are its flag's.
Nothing below the command line reads the environment. Unknown keys fail, naming
the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from paceline.protocol.features import MAX_KEPT_FEATURE_BYTES
from paceline.protocol.proposal import AUTO, NONE
from paceline.protocol.target import LIFE_SIGN_MS
from paceline.runtime.llama_settings import LlamaSettings
from paceline.runtime.logs import LogFormat
from paceline.runtime.roles import PeerRole, RolePolicy
from paceline.runtime.settings import NO_FLAG, SECTION_FLAG, Flag, Settings
from paceline.runtime.sources import SourcedValue, load

DEFAULT_MODEL = "smollm2-135m"
FAST_DTYPE: Literal["fast"] = "fast"
NOT_QUANTIZED: Literal["none"] = "none"
COORDINATOR_PORT = 50051
DRAFT_PORT = 50052
TARGET_PORT = 50053
HTTP_PORT = 8000
LOCALHOST = "127.0.0.1"

Port = Annotated[int, Field(ge=0, le=65535)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8"]
EngineName = Literal["auto", "torch", "llama"]


class StopSettings(Settings):
    """What `paceline serve` passes on to every service."""

    drain_seconds: float = Field(5.0, ge=0, le=600, description="Time that running sessions get on SIGTERM.")
    log_format: LogFormat = Field(
        "console", description="Of log lines: console, for people, or json, one object each."
    )


class ServerSettings(StopSettings):
    """What every gRPC server of ours needs."""

    host: str = Field(LOCALHOST, description="Address to listen on.")
    port: Port = Field(0, description="gRPC port; 0 takes a free one.")
    health_port: int | None = Field(
        None, ge=0, le=65535, description="A second, plaintext port for grpc.health.v1 alone."
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="A plaintext HTTP port for Prometheus, path /metrics; 0 takes a free one."
    )
    vllm_metrics: bool = Field(
        False, description="Tell Prometheus the metrics that vLLM has under vLLM's names, too."
    )
    tls_certificate: Path | None = Field(None, description="PEM certificate to serve with.")
    tls_key: Path | None = Field(None, description="PEM key of the certificate.")
    tls_client_ca: Path | None = Field(None, description="Require client certificates signed by this CA.")
    tls_roles: RolePolicy = Field(
        "required",
        description="With a client CA: calls need a role in the certificate; off: any of its certificates.",
    )
    port_file: Path | None = Field(None, description="Written with host:port once the server is SERVING.")
    stop_with_stdin: bool = Field(
        False, description="Stop, as on SIGTERM, when standard input ends: the process that started this one is gone."
    )


class TraceSettings(Settings):
    """What is traced though its request is not sampled; the standard `OTEL_*` variables say where traces go."""

    slow_round_ms: Annotated[float | None, Flag("slow_round_ms")] = Field(
        None, gt=0, description="Trace rounds, and steps of a service, that take longer, sampled or not; unset: none."
    )
    slow_request_ms: Annotated[float | None, Flag("slow_request_ms")] = Field(
        None, gt=0, description="Trace requests that take longer, with their last rounds; unset: none."
    )

    @property
    def slow(self) -> bool:
        """Whether anything is traced for being slow."""
        return self.slow_round_ms is not None or self.slow_request_ms is not None


class PeerSettings(Settings):
    """How to reach a peer."""

    address: Annotated[str, SECTION_FLAG]
    tls_ca: Annotated[Path | None, NO_FLAG] = Field(None, description="Trust this CA and use TLS; unset: plaintext.")
    tls_certificate: Annotated[Path | None, NO_FLAG] = None
    tls_key: Annotated[Path | None, NO_FLAG] = None
    server_name: Annotated[str | None, NO_FLAG] = Field(
        None, description="Name in the peer's certificate; unset: the address's host."
    )


class PoolSettings(Settings):
    """How to reach several peers of one kind."""

    address: Annotated[tuple[str, ...], SECTION_FLAG] = Field(min_length=1)
    tls_ca: Annotated[Path | None, NO_FLAG] = Field(None, description="Trust this CA and use TLS; unset: plaintext.")
    tls_certificate: Annotated[Path | None, NO_FLAG] = None
    tls_key: Annotated[Path | None, NO_FLAG] = None
    server_name: Annotated[str | None, NO_FLAG] = Field(
        None, description="Name in every peer's certificate; unset: the role's, the DNS name or the address's host."
    )

    @field_validator("address", mode="before")
    @classmethod
    def _one_is_enough(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class ModelSettings(Settings):
    """What `paceline serve` passes on to every service that loads a model."""

    max_model_len: int = Field(0, ge=0, le=1 << 22, description="Longest session in tokens; 0: the model's own.")
    max_num_seqs: int = Field(256, ge=1, le=65536, description="Most sessions open at once.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of a GPU's memory to use.")
    reproducible: bool = Field(False, description="Fixed shapes: the same bits whatever runs beside a session.")
    trust_remote_code: bool = Field(False, description="Run the code of a hub model's repository.")
    llama: LlamaSettings = LlamaSettings()


class EngineSettings(ModelSettings):
    """How a model is loaded and what it may hold."""

    engine: EngineName = Field(
        "auto", description="What computes; auto: llama.cpp for a .gguf file where the extra llama is, else torch."
    )
    dtype: Literal[Dtype, "fast"] = Field(
        "auto",
        description="Precision; fast, for drafts: on CPUs weights of 8 bits or bfloat16, where auto is float32.",
    )
    quantization: Quantization = Field(
        NOT_QUANTIZED, description="int8: weights of 8 bits, and the text of the model so rounded; on CPUs alone."
    )
    device: str = Field("auto", description="auto, cpu or cuda.")
    threads: int = Field(0, ge=0, le=1024, description="Compute threads; 0: every core.")
    kv_bytes: int = Field(
        0, ge=0, description="KV budget of each rank; 0: from gpu_memory_utilization, or 2 GiB on a CPU."
    )
    prefill_chunk: int = Field(128, ge=1, le=65536, description="Most prompt tokens in one step.")
    max_step_rows: int = Field(
        1024, ge=128, le=1 << 20, description="Most rows of one step; further rounds wait for the next."
    )
    max_sessions_per_link: int = Field(
        1024, ge=1, le=1 << 20, description="Most sessions that one coordinator has open, those that wait included."
    )
    prefix_reuse: bool = Field(True, description="Compute a prefix that sessions of one tenant share once.")
    share_prefixes: bool = Field(
        False, description="Share prefixes between tenants, too: each can tell what the others have sent."
    )
    reproducible_rows: int = Field(
        16, ge=8, le=64, multiple_of=8, description="Rows of a reproducible step; others are padded or cut to it."
    )
    cuda_graphs: bool = Field(True, description="Capture each shape of a step on a GPU once, and replay it.")
    kernels: Literal["auto", "torch", "triton"] = Field(
        "auto", description="What attends and races in steps: torch, or our kernels in Triton; auto: those, on a GPU."
    )


class GrammarSettings(Settings):
    """What the grammars of users may take; each is compiled and followed in a process of its own."""

    compile_ms: Annotated[int, Flag("grammar_compile_ms")] = Field(
        5_000, ge=10, le=600_000, description="Longest time that compiling a grammar may take."
    )
    step_ms: Annotated[int, Flag("grammar_step_ms")] = Field(
        1_000, ge=10, le=600_000, description="Longest time that a grammar may take over one round's tokens."
    )
    memory_bytes: Annotated[int, Flag("grammar_memory_bytes")] = Field(
        1 << 29, ge=1 << 24, le=1 << 40, description="Most memory that one grammar may take."
    )
    workers: Annotated[int, Flag("grammar_workers")] = Field(
        4, ge=1, le=1024, description="Most grammars that are compiled at once; as many again that take long."
    )
    cache_bytes: Annotated[int, Flag("grammar_cache_bytes")] = Field(
        1 << 30,
        ge=1 << 24,
        le=1 << 40,
        description="Most memory of all compiled grammars, past requests' included.",
    )


class RankSettings(Settings):
    """What `paceline serve` passes on to the target alone."""

    tensor_parallel_size: Annotated[int, Flag(short="-tp")] = Field(
        1, ge=1, le=1024, description="Ranks that share the target model: a divisor of its heads and KV heads."
    )


class TargetConfig(RankSettings):
    """The target service."""

    variables: ClassVar[str] = "PACELINE_TARGET_"
    unused_keys: ClassVar[tuple[str, ...]] = ("traces.slow_request_ms",)

    model: str = Field(DEFAULT_MODEL, description="Pulled model, hub id, folder, .gguf file or table:… name.")
    server: ServerSettings = ServerSettings(port=TARGET_PORT)
    engine: EngineSettings = EngineSettings()
    grammar: GrammarSettings = GrammarSettings()
    traces: TraceSettings = TraceSettings()
    max_queue: int = Field(
        1024, ge=1, le=1 << 20, description="Most sessions waiting for room before RESOURCE_EXHAUSTED."
    )
    max_link_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Largest share of the KV rows for one coordinator; its further sessions wait.",
    )
    step_timeout_ms: float = Field(
        120_000.0, gt=0, description="A step that takes longer hangs: coordinators see no more life in the target."
    )

    @field_validator("engine")
    @classmethod
    def _llama_has_one_rank(cls, engine: EngineSettings, others: ValidationInfo) -> EngineSettings:
        if engine.engine == "llama" and others.data.get("tensor_parallel_size", 1) > 1:
            raise ValueError("llama.cpp has one rank; split_mode divides a model between GPUs")
        return engine


class DraftConfig(Settings):
    """The draft service."""

    variables: ClassVar[str] = "PACELINE_DRAFT_"
    unused_keys: ClassVar[tuple[str, ...]] = (
        "engine.reproducible",
        "engine.reproducible_rows",
        "engine.quantization",
        "traces.slow_request_ms",
    )

    drafters: Annotated[tuple[str, ...], Flag("drafter")] = Field(
        ("model:default",),
        description="model:NAME, the default first; repeatable. model:default is in paceline-drafts.",
    )
    target_model: str | None = Field(
        None, description="Target that is drafted for; a draft model of another tokenizer needs its name."
    )
    server: ServerSettings = ServerSettings(port=DRAFT_PORT)
    engine: EngineSettings = EngineSettings(dtype=FAST_DTYPE)
    """A draft's precision changes speed only, so the fast one is the default."""
    grammar: GrammarSettings = GrammarSettings()
    traces: TraceSettings = TraceSettings()

    @field_validator("engine")
    @classmethod
    def _not_reproducible(cls, engine: EngineSettings) -> EngineSettings:
        if engine.reproducible:
            raise ValueError("a draft's bits change no text; reproducible is the target's")
        return engine


class RequestSettings(Settings):
    """What `paceline serve` passes on to the coordinator, for requests that leave it open."""

    served_model_name: str | None = Field(None, description="Name that requests use; unset: the model's.")
    num_draft_tokens: int | None = Field(
        None, ge=0, le=64, description="Tokens to propose in each round; unset: the policy chooses."
    )
    seed: int | None = Field(None, ge=0, lt=1 << 64, description="Seed of requests that bring none; unset: drawn.")
    generation_config: Literal["auto", "none", "vllm"] = Field(
        "auto",
        description="auto: temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens that a request"
        " leaves out are those of the model's generation_config.json; none, or vllm: they are not.",
    )
    corpus: tuple[str, ...] = Field(
        (), description="File or folder of UTF-8 texts whose passages are drafted for all requests; repeatable."
    )
    corpus_tokens: int = Field(
        1 << 20, ge=1, le=1 << 28, description="Most tokens of the corpus; each takes about 100 bytes of memory."
    )
    share_texts: tuple[str, ...] = Field(
        (),
        description="Tenant (a key's, or its name) whose finished texts draft for its later requests; *: each for"
        " itself; repeatable. Who sends requests of that tenant can tell by their speed what it was told before.",
    )
    shared_mib: int = Field(64, ge=1, le=1 << 16, description="Memory for finished texts; the oldest are forgotten.")


class CoordinatorConfig(RequestSettings):
    """The coordinator. `draft` unset: every round is target-only or proposed from n-grams."""

    variables: ClassVar[str] = "PACELINE_COORDINATOR_"

    model: str = Field(DEFAULT_MODEL, description="Names the tokenizer; must be the target's.")
    server: ServerSettings = ServerSettings(port=COORDINATOR_PORT)
    traces: TraceSettings = TraceSettings()
    target: PoolSettings = Field(
        PoolSettings(address=(f"{LOCALHOST}:{TARGET_PORT}",)),
        description="HOST:PORT, dns:///NAME:PORT or file:PATH of target services of one model; repeatable.",
    )
    draft: PoolSettings | None = Field(
        None, description="HOST:PORT, dns:///NAME:PORT or file:PATH of draft services, or none; repeatable."
    )
    peer_ca: Path | None = Field(
        None, description="Trust this CA for target and draft, whatever their own settings say; switches TLS on."
    )
    peer_certificate: Path | None = Field(None, description="PEM certificate to show to target and draft, likewise.")
    peer_key: Path | None = Field(None, description="PEM key of the certificate.")
    peer_roles: RolePolicy = Field(
        "required", description="Where a certificate is shown: the peer's must name its role; off: its host."
    )
    drafter: str = Field(AUTO, description="auto, ngram, none, or a drafter of the draft service.")
    fan_out: int = Field(
        4, ge=0, le=64, description="Next tokens per accepted node to draft for while a round is verified; 0: none."
    )
    lease: int = Field(
        16, ge=0, le=64, description="Most rounds the target may begin by itself where nothing is proposed; 0: none."
    )
    max_prefetched: int = Field(
        24, ge=0, le=64, description="Most proposals left with the target for one round's outcomes; 0: none."
    )
    feature_dtype: Literal["float16", "int8"] = Field(
        "float16", description="How targets write hidden states for drafters that read them; int8: half the bytes."
    )
    max_feature_bytes: int = Field(
        MAX_KEPT_FEATURE_BYTES,
        ge=1 << 20,
        description="Hidden states kept of one request, for a draft session that is opened later or again.",
    )
    record_to: Path | None = Field(
        None, description="Folder for what drafts would have got right, a line a request (paceline bench record)."
    )
    log_prompts: bool = Field(False, description="Write the prompt of every request into the log.")
    api_keys: Path | None = Field(
        None,
        description="File of API keys (paceline keys), read again as it changes; unset: no key is asked for.",
    )
    max_concurrent_requests: int = Field(
        1024, ge=1, le=1 << 20, description="Most requests that run at once before RESOURCE_EXHAUSTED."
    )
    draft_timeout_ms: float = Field(
        1_000.0, gt=0, description="Longest wait for a proposal; the planner mostly allows less."
    )
    round_timeout_ms: float = Field(
        30_000.0,
        ge=2 * LIFE_SIGN_MS,
        description="A target that says nothing of a session for so long has lost it; a busy one names those that"
        " wait every 250 ms.",
    )
    target_wait_ms: float = Field(30_000.0, ge=0, description="Longest wait for a dead target to come back.")
    reconnect_min_ms: float = Field(50.0, gt=0, description="First pause before a broken link is tried again.")
    reconnect_max_ms: float = Field(2_000.0, gt=0, description="Longest pause between two tries.")

    @field_validator("draft", mode="before")
    @classmethod
    def _none_is_unset(cls, value: object) -> object:
        """`--draft none`, `draft = "none"`."""
        address = value.get("address") if isinstance(value, dict) else value
        return None if address in (NONE, [NONE], (NONE,)) else value

    def reach(self, pool: PoolSettings, role: PeerRole, address: str, server_name: str | None = None) -> PeerSettings:
        """How to reach one of the targets or draft services: with what is set for both, and by its role's name.

        Args:
            pool: which of them.
            role: what it is.
            address: its HOST:PORT.
            server_name: the name that it was found by, if it was.
        """
        by_role = bool(self.peer_certificate or pool.tls_certificate) and self.peer_roles == "required"
        return PeerSettings(
            address=address,
            server_name=pool.server_name or (role.server_name if by_role else server_name),
            tls_ca=self.peer_ca or pool.tls_ca,
            tls_certificate=self.peer_certificate or pool.tls_certificate,
            tls_key=self.peer_key or pool.tls_key,
        )


Config = TypeVar("Config", bound=Settings)


def load_config(kind: type[Config], file: Path | None, flags: Mapping[str, object]) -> Config:
    """Merge a TOML file and flags (dotted keys, `None` means not given) into one config.

    Raises:
        InvalidInput: naming the key, its value and the limit.
    """
    return load(kind, file, {key: SourcedValue(value) for key, value in flags.items() if value is not None}).config
