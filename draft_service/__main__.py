"""`python -m draft_service`: the draft service as a process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from paceline.drafters.names import check_drafters
from paceline.engine.executor import Executor
from paceline.rpc.servicer import serve_sessions
from paceline.runtime import logs, metrics, telemetry
from paceline.runtime.config import DraftConfig
from paceline.runtime.options import parse_config
from paceline.runtime.process import run_service
from paceline.sampling import racing
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1 import draft_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from draft_service.drafters.catalogue import Catalogue
    from draft_service.servicer import DraftServicer

SERVICE = pb.DESCRIPTOR.services_by_name["DraftService"].full_name


async def serve(config: DraftConfig) -> None:
    """Load the model with the server already up, then serve until stopped.

    Raises:
        PacelineError: the model can't be served, or the port is taken.
    """
    logs.use_format(config.server.log_format)
    telemetry.configure("paceline-draft", config.traces)
    metrics.configure("paceline-draft", config.server, model=config.drafters[0])
    executor = Executor("draft-engine")

    async def load() -> DraftServicer:
        catalogue = await executor.run(_load, config)
        from draft_service.servicer import DraftServicer

        return DraftServicer(catalogue, executor, config.engine)

    async def drain(serving: DraftServicer) -> None:
        await serving.scheduler.idle()

    try:
        add = pb_grpc.add_DraftServiceServicer_to_server
        loading = f"the draft service is still loading {', '.join(config.drafters)}"
        await serve_sessions(config.server, SERVICE, load, add, drain, stop=asyncio.Event(), loading=loading)
    finally:
        executor.close()
        telemetry.shutdown()
        metrics.shutdown()


def _load(config: DraftConfig) -> Catalogue:
    from draft_service.drafters.catalogue import build_catalogue
    from paceline.sampling import ranking

    racing.warm_up()
    ranking.warm_up()
    return build_catalogue(config)


def start(config: DraftConfig) -> Coroutine[Any, Any, None]:
    """Check the configuration and serve.

    Raises:
        InvalidInput: an unknown kind of drafter.
    """
    check_drafters(config.drafters)
    return serve(config)


def main() -> None:
    """Run the draft service.

    Example: paceline draft-service --drafter model:default --target-model smollm2-135m
    """
    run_service("draft service", lambda: start(parse_config(DraftConfig, inspect.getdoc(main) or "")))


if __name__ == "__main__":
    main()
