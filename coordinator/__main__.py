"""`python -m coordinator`: the coordinator as a process."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from typing import Any

import grpc

from coordinator.servicer import GenerationServicer
from coordinator.sessions.draft import DraftPeer
from coordinator.sessions.target import TargetPeer
from paceline.access.gate import gate_of
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.handshake import Fingerprint, Hello
from paceline.rpc.exposure import warn_if_exposed
from paceline.rpc.frames import first_to_end
from paceline.rpc.peer_link import DraftLink, PeerLink, TargetLink
from paceline.rpc.server import run_server
from paceline.runtime import telemetry
from paceline.runtime.config import CoordinatorConfig
from paceline.runtime.options import parse_config
from paceline.runtime.process import keep_loaded, run_service
from paceline.runtime.roles import Role
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


async def serve(config: CoordinatorConfig) -> None:
    """Load the tokenizer with the server already up, keep the links and serve until stopped.

    Raises:
        InvalidInput: the model's tokenizer can't be loaded, the key file is not valid, or the port is taken.
    """
    gate = gate_of(config.api_keys)
    if config.api_keys is None and config.server.tls_client_ca is None:
        warn_if_exposed(config.server, "requests without a key", "set api_keys or server.tls_client_ca")
    telemetry.configure("paceline-coordinator")
    links: list[PeerLink[Any, Any]] = []
    servicer: GenerationServicer | None = None

    async def register(server: grpc.aio.Server) -> None:
        nonlocal servicer
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        target, draft = _peers(config, tokenizer)
        links.extend(peer.link for peer in (target, draft) if peer is not None)
        servicer = GenerationServicer(config, tokenizer, target, draft, gate)
        pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        keep_loaded()
        for link in links:
            await link.start()

    try:
        loading = f"the coordinator is still loading the tokenizer of {config.model}"
        await first_to_end(run_server(config.server, register, [SERVICE], loading=loading), gate.watch())
    finally:
        if servicer is not None:
            servicer.close()
        for link in links:
            await link.close()
        telemetry.shutdown()


def _peers(config: CoordinatorConfig, tokenizer: Tokenizer) -> tuple[TargetPeer, DraftPeer | None]:
    hello = Hello(
        incarnation=secrets.token_hex(8),
        fingerprint=Fingerprint(tokenizer=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size),
    )
    backoff: dict[str, Any] = {
        "reconnect_min_ms": config.reconnect_min_ms,
        "reconnect_max_ms": config.reconnect_max_ms,
    }
    target = TargetPeer(
        TargetLink(config.reach(config.target, Role.TARGET), hello, **backoff),
        round_timeout_s=config.round_timeout_ms / 1e3,
        wait_s=config.target_wait_ms / 1e3,
    )
    if config.draft is None:
        return target, None
    draft = DraftPeer(
        DraftLink(config.reach(config.draft, Role.DRAFT), hello, **backoff),
        timeout_s=config.draft_timeout_ms / 1e3,
        vocab_size=tokenizer.vocab_size,
    )
    return target, draft


def main() -> None:
    """Run the coordinator.

    Example: paceline coordinator --model smollm2-135m --target 127.0.0.1:50053 --draft 127.0.0.1:50052
    """
    run_service("coordinator", lambda: serve(parse_config(CoordinatorConfig, inspect.getdoc(main) or "")))


if __name__ == "__main__":
    main()
