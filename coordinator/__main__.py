"""`python -m coordinator`: the coordinator as a process."""

from __future__ import annotations

import asyncio
import inspect

import grpc

from coordinator.pools import Pools
from coordinator.servicer import GenerationServicer
from paceline.models.tokenizer import load_tokenizer
from paceline.rpc.server import run_server
from paceline.runtime import telemetry
from paceline.runtime.config import CoordinatorConfig
from paceline.runtime.options import parse_config
from paceline.runtime.process import keep_loaded, run_service
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


async def serve(config: CoordinatorConfig) -> None:
    """Load the tokenizer with the server already up, keep the links and serve until stopped.

    Raises:
        InvalidInput: the model's tokenizer can't be loaded, or the port is taken.
    """
    telemetry.configure("paceline-coordinator")
    pools: Pools | None = None

    async def register(server: grpc.aio.Server) -> None:
        nonlocal pools
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        pools = Pools.of(config, tokenizer)
        servicer = GenerationServicer(config, tokenizer, pools.target, pools.draft)
        pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        keep_loaded()
        pools.start()

    try:
        loading = f"the coordinator is still loading the tokenizer of {config.model}"
        await run_server(config.server, register, [SERVICE], loading=loading)
    finally:
        if pools is not None:
            await pools.close()
        telemetry.shutdown()


def main() -> None:
    """Run the coordinator.

    Example: paceline coordinator --model smollm2-135m --target 127.0.0.1:50053 --draft 127.0.0.1:50052
    """
    run_service("coordinator", lambda: serve(parse_config(CoordinatorConfig, inspect.getdoc(main) or "")))


if __name__ == "__main__":
    main()
