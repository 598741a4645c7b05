"""`python -m coordinator`: the coordinator as a process."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from coordinator.policy.drafting import DraftingSettings
from coordinator.servicer import CoordinatorSettings, GenerationServicer
from coordinator.sessions.draft import DraftPeer
from coordinator.sessions.target import TargetPeer
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.handshake import Fingerprint, Hello
from paceline.protocol.proposal import NONE
from paceline.rpc.peer_link import DraftLink, TargetLink
from paceline.rpc.server import run_server
from paceline.runtime import telemetry
from paceline.runtime.config import CoordinatorConfig, load_config
from paceline.runtime.process import keep_loaded, run_service
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


async def serve(config: CoordinatorConfig) -> None:
    """Keep the links and serve until stopped.

    Raises:
        InvalidInput: the model's tokenizer can't be loaded, or the port is taken.
    """
    telemetry.configure("paceline-coordinator")
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
    target, draft = _peers(config, tokenizer)
    settings = CoordinatorSettings(
        model=config.served_model_name or config.model,
        drafting=DraftingSettings(
            config.drafter, config.num_draft_tokens, config.fan_out, config.lease, config.max_prefetched
        ),
        seed=config.seed,
        max_concurrent_requests=config.max_concurrent_requests,
    )
    links = [target.link] + ([draft.link] if draft else [])

    async def register(server: grpc.aio.Server) -> None:
        servicer = GenerationServicer(settings, tokenizer, target, draft)
        pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        keep_loaded()
        for link in links:
            await link.start()

    try:
        await run_server(config.server, register, [SERVICE])
    finally:
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
        TargetLink(config.target, hello, **backoff),
        round_timeout_s=config.round_timeout_ms / 1e3,
        wait_s=config.target_wait_ms / 1e3,
    )
    if config.draft is None:
        return target, None
    draft = DraftPeer(
        DraftLink(config.draft, hello, **backoff),
        timeout_s=config.draft_timeout_ms / 1e3,
        vocab_size=tokenizer.vocab_size,
    )
    return target, draft


def main(
    config: Annotated[Path | None, typer.Option(help="TOML file; flags override it.")] = None,
    model: Annotated[str | None, typer.Option(help="Names the tokenizer; must be the target's.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that requests use; default: the model.")] = None,
    target: Annotated[str | None, typer.Option(help="HOST:PORT of the target service.")] = None,
    draft: Annotated[str | None, typer.Option(help="HOST:PORT of the draft service, or none.")] = None,
    drafter: Annotated[str | None, typer.Option(help="auto, ngram, or a drafter of the draft service.")] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens to propose in each round; default: the policy chooses.")
    ] = None,
    fan_out: Annotated[
        int | None, typer.Option(help="Next tokens to draft for while a round is verified; 0: none.")
    ] = None,
    lease: Annotated[
        int | None, typer.Option(help="Rounds the target may begin by itself where nothing is proposed; 0: none.")
    ] = None,
    max_prefetched: Annotated[
        int | None, typer.Option(help="Proposals left with the target for one round's outcomes; 0: none.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of requests that bring none; default: drawn.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one.")] = None,
    health_port: Annotated[int | None, typer.Option(help="Plaintext port for health alone.")] = None,
    port_file: Annotated[Path | None, typer.Option(help="Written with host:port once SERVING.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM certificate to serve with.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Require client certificates of this CA.")] = None,
    peer_ca: Annotated[Path | None, typer.Option(help="Trust this CA for target and draft; switches TLS on.")] = None,
) -> None:
    """Run the coordinator.

    Example: paceline coordinator --model smollm2-135m --target 127.0.0.1:50053 --draft 127.0.0.1:50052
    """
    drafts = draft is not None and draft != NONE
    flags: dict[str, object] = {
        "model": model,
        "served_model_name": served_model_name,
        "target.address": target,
        "target.tls_ca": peer_ca,
        "draft.address": draft if drafts else None,
        "draft.tls_ca": peer_ca if drafts else None,
        "drafter": drafter,
        "num_draft_tokens": num_draft_tokens,
        "fan_out": fan_out,
        "lease": lease,
        "max_prefetched": max_prefetched,
        "seed": seed,
        "server.host": host,
        "server.port": port,
        "server.health_port": health_port,
        "server.port_file": port_file,
        "server.tls_certificate": tls_certificate,
        "server.tls_key": tls_key,
        "server.tls_client_ca": tls_client_ca,
    }

    def start() -> Coroutine[Any, Any, None]:
        loaded = load_config(CoordinatorConfig, config, flags)
        if draft == NONE:
            loaded = loaded.model_copy(update={"draft": None})
        return serve(loaded)

    run_service("coordinator", start)


if __name__ == "__main__":
    typer.run(main)
