"""The settings of the HTTP gateway, which `paceline.runtime.config` would be too long with."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from paceline.runtime.config import (
    COORDINATOR_PORT,
    DEFAULT_MODEL,
    HTTP_PORT,
    LOCALHOST,
    PeerSettings,
    PoolSettings,
    ServerSettings,
    TraceSettings,
)
from paceline.runtime.roles import PeerRole
from paceline.runtime.settings import Settings


class GatewayConfig(Settings):
    """The HTTP gateway, in front of one coordinator or of several that serve one model."""

    variables: ClassVar[str] = "PACELINE_GATEWAY_"
    unused_keys: ClassVar[tuple[str, ...]] = ("server.health_port", "server.tls_roles", "traces.slow_round_ms")

    model: str = Field(DEFAULT_MODEL, description="Names tokenizer and chat template; must be the target's.")
    served_model_name: str | None = Field(None, description="Name that requests use; unset: the coordinator's.")
    server: ServerSettings = ServerSettings(port=HTTP_PORT)
    traces: TraceSettings = TraceSettings()
    coordinator: PoolSettings = Field(
        PoolSettings(address=(f"{LOCALHOST}:{COORDINATOR_PORT}",)),
        description="HOST:PORT, dns:///NAME:PORT or file:PATH of coordinators of one model; repeatable.",
    )
    peer_ca: Path | None = Field(
        None, description="Trust this CA for coordinators, whatever their own settings say; switches TLS on."
    )
    peer_certificate: Path | None = Field(None, description="PEM certificate to show to coordinators, likewise.")
    peer_key: Path | None = Field(None, description="PEM key of the certificate.")
    coordinator_wait_ms: float = Field(
        10_000.0, ge=0, description="Longest wait for a coordinator that is gone, or that has no target, before 503."
    )
    generation_timeout_s: float | None = Field(
        None, gt=0, le=86_400, description="Longest time of one generation before 504; unset: no limit."
    )
    max_concurrent_requests: int = Field(
        1024, ge=1, le=1 << 20, description="Most HTTP requests that run at once before 429."
    )
    max_body_bytes: int = Field(4 << 20, ge=1 << 10, le=1 << 30, description="Longest body of a request before 413.")
    max_answer_bytes: int = Field(
        64 << 20,
        ge=1 << 10,
        le=1 << 40,
        description="Longest answer that is sent whole, before 400: choices and log-probabilities together.",
    )
    head_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Longest time that a request's line and headers may take."
    )
    body_timeout_s: float = Field(30.0, gt=0, le=3600, description="Longest time that a body may take before 408.")
    allowed_host: tuple[str, ...] = Field(
        (),
        description="Names that requests may call the gateway by, beside addresses and localhost; *.NAME, * for all; "
        "repeatable. Unset: all, but none while server.host is this machine's own.",
    )
    max_waiting_connections: int = Field(
        4096,
        ge=1,
        le=1 << 20,
        description="Most connections; beyond, the oldest without a whole request ends, of the address with most.",
    )
    max_waiting_bytes: int = Field(
        256 << 20,
        ge=1 << 10,
        le=1 << 40,
        description="Most bytes of bodies that are not let in, of all requests together; likewise.",
    )
    reader_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="Longest time that a reader may take nothing before it is cut off."
    )

    def reach(self, address: str, server_name: str | None = None) -> PeerSettings:
        """How to reach one of the coordinators: where a certificate is shown, by the role's name.

        Args:
            address: its HOST:PORT.
            server_name: the name that it was found by, if it was.
        """
        pool = self.coordinator
        certificate = self.peer_certificate or pool.tls_certificate
        return PeerSettings(
            address=address,
            server_name=pool.server_name or (PeerRole.COORDINATOR.server_name if certificate else server_name),
            tls_ca=self.peer_ca or pool.tls_ca,
            tls_certificate=certificate,
            tls_key=self.peer_key or pool.tls_key,
        )
