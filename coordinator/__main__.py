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
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.handshake import Fingerprint, Hello
from paceline.rpc.peer_link import DraftLink, PeerLink, TargetLink
from paceline.rpc.server import run_server
from paceline.runtime import telemetry
from paceline.runtime.config import CoordinatorConfig
from paceline.runtime.options import parse_config
from paceline.runtime.process import keep_loaded, run_service
from paceline.sampling import drafted
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


async def serve(config: CoordinatorConfig) -> None:
    """Load the tokenizer with the server already up, keep the links and serve until stopped.

    Raises:
        InvalidInput: the model's tokenizer can't be loaded, or the port is taken.
    """
    telemetry.configure("paceline-coordinator")
    links: list[PeerLink[Any, Any]] = []

    async def register(server: grpc.aio.Server) -> None:
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        await asyncio.to_thread(drafted.warm_up)
        target, draft = _peers(config, tokenizer)
        links.extend(peer.link for peer in (target, draft) if peer is not None)
        servicer = GenerationServicer(config, tokenizer, target, draft)
        pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        keep_loaded()
        for link in links:
            await link.start()

    try:
        loading = f"the coordinator is still loading the tokenizer of {config.model}"
        await run_server(config.server, register, [SERVICE], loading=loading)
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
        TargetLink(config.reach(config.target), hello, **backoff),
        round_timeout_s=config.round_timeout_ms / 1e3,
        wait_s=config.target_wait_ms / 1e3,
    )
    if config.draft is None:
        return target, None
    draft = DraftPeer(
        DraftLink(config.reach(config.draft), hello, **backoff),
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
