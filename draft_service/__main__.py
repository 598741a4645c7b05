"""`python -m draft_service`: the draft service as a process."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import grpc

from draft_service.drafters.names import check_drafters
from paceline.engine.executor import Executor
from paceline.rpc.server import run_server
from paceline.runtime import telemetry
from paceline.runtime.config import DraftConfig
from paceline.runtime.options import parse_config
from paceline.runtime.process import keep_loaded, run_service
from paceline.sampling import racing
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1 import draft_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from draft_service.drafters.catalogue import Catalogue
    from draft_service.servicer import DraftServicer

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["DraftService"].full_name
TARGETS_OWN = ("engine.reproducible", "engine.reproducible_rows")
"""Settings of an engine that a draft service refuses or has no use for."""


async def serve(config: DraftConfig) -> None:
    """Load the model with the server already up, then serve until stopped.

    Raises:
        PacelineError: the model can't be served, or the port is taken.
    """
    telemetry.configure("paceline-draft")
    executor = Executor("draft-engine")
    try:
        await _serve_on(executor, config)
    finally:
        executor.close()
        telemetry.shutdown()


async def _serve_on(executor: Executor, config: DraftConfig) -> None:
    # torch and transformers take seconds to import: health answers meanwhile.
    serving: DraftServicer | None = None
    stop = asyncio.Event()

    async def register(server: grpc.aio.Server) -> None:
        nonlocal serving
        catalogue = await executor.run(_load, config)
        from draft_service.servicer import DraftServicer

        serving = DraftServicer(catalogue, executor, config.engine.max_num_seqs)
        # A service that can't step any more must not look healthy.
        serving.runner.add_done_callback(lambda _: stop.set())
        pb_grpc.add_DraftServiceServicer_to_server(serving, server)
        keep_loaded()

    async def drain() -> None:
        if serving is not None:
            await serving.scheduler.idle()

    try:
        loading = f"the draft service is still loading {', '.join(config.drafters)}"
        await run_server(config.server, register, [SERVICE], stop, on_drain=drain, loading=loading)
    finally:
        if serving is not None:
            await serving.close()


def _load(config: DraftConfig) -> Catalogue:
    from draft_service.drafters.catalogue import build_catalogue
    from paceline.sampling import ranking

    racing.warm_up()
    ranking.warm_up()
    return build_catalogue(config)


def start(config: DraftConfig) -> Coroutine[Any, Any, None]:
    """What this process is to do.

    Raises:
        InvalidInput: a drafter that isn't one.
    """
    check_drafters(config.drafters)
    return serve(config)


def main() -> None:
    """Run the draft service.

    Example: paceline draft-service --drafter model:default --target-model smollm2-135m
    """
    run_service("draft service", lambda: start(parse_config(DraftConfig, inspect.getdoc(main) or "", TARGETS_OWN)))


if __name__ == "__main__":
    main()
