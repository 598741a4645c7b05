"""`python -m coordinator`: the coordinator as a process."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import grpc

from coordinator.pools import Pools
from coordinator.servicer import GenerationServicer
from coordinator.text.library import EVERY_TENANT, Library, load_corpus
from paceline.access.gate import gate_of
from paceline.models.generation_defaults import load_defaults
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.errors import require
from paceline.rpc.frames import first_to_end
from paceline.rpc.server import MAX_CALLS, run_server, warn_if_exposed
from paceline.runtime import logs, metrics, telemetry
from paceline.runtime.config import CoordinatorConfig
from paceline.runtime.options import parse_config
from paceline.runtime.process import keep_loaded, leave_torch_out, run_service
from paceline.sampling import drafted, suffix
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


async def serve(config: CoordinatorConfig) -> None:
    """Load the tokenizer with the server already up, keep the links and serve until stopped.

    Raises:
        InvalidInput: the model's tokenizer or generation config can't be read, a text of the corpus can't be read,
            the key file is not valid, or the port is taken.
    """
    logs.use_format(config.server.log_format)
    gate = gate_of(config.api_keys)
    if config.api_keys is None and config.server.tls_client_ca is None:
        warn_if_exposed(config.server, "requests without a key", "set api_keys or server.tls_client_ca")
    telemetry.configure("paceline-coordinator", config.traces)
    metrics.configure("paceline-coordinator", config.server, model=config.served_model_name or config.model)
    pools: Pools | None = None
    servicer: GenerationServicer | None = None

    async def register(server: grpc.aio.Server) -> None:
        nonlocal pools, servicer
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        for module in (drafted, suffix):
            await asyncio.to_thread(module.warm_up)
        pools = Pools.of(config, tokenizer)
        library = await asyncio.to_thread(_library, config, tokenizer)
        defaults = await asyncio.to_thread(load_defaults, config.model, config.generation_config)
        servicer = GenerationServicer(config, tokenizer, pools.target, pools.draft, gate, library, defaults)
        pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        keep_loaded()
        pools.start()

    try:
        loading = f"the coordinator is still loading the tokenizer of {config.model}"
        most_calls = config.max_concurrent_requests + MAX_CALLS
        serving = run_server(config.server, register, [SERVICE], loading=loading, most_calls=most_calls)
        await first_to_end(serving, gate.watch())
    finally:
        if servicer is not None:
            servicer.close()
        if pools is not None:
            await pools.close()
        telemetry.shutdown()
        metrics.shutdown()


def _library(config: CoordinatorConfig, tokenizer: Tokenizer) -> Library:
    """The texts, besides a request's own, from which proposals may be copied.

    Raises:
        InvalidInput: a text of the corpus can't be read, or tenants are named though nobody has a key.
    """
    tenants = [tenant for tenant in config.share_texts if tenant != EVERY_TENANT]
    require(not tenants or config.api_keys is not None, "share_texts", tenants, "* where api_keys is unset")
    corpus = load_corpus([Path(path) for path in config.corpus], tokenizer, config.corpus_tokens)
    return Library(corpus, config.share_texts, config.shared_mib << 20)


def main() -> None:
    """Run the coordinator.

    Example: paceline coordinator --model smollm2-135m --target 127.0.0.1:50053 --draft 127.0.0.1:50052
    """
    leave_torch_out()
    run_service("coordinator", lambda: serve(parse_config(CoordinatorConfig, inspect.getdoc(main) or "")))


if __name__ == "__main__":
    main()
