"""`python -m target_service`: the target service as a process."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.engine.executor import Executor
from paceline.engine.parallel.launch import be_rank
from paceline.engine.parallel.place import Place, place_from
from paceline.models.tokenizer import load_tokenizer
from paceline.rpc.frames import first_to_end
from paceline.rpc.servicer import serve_sessions
from paceline.runtime import logs, metrics, telemetry
from paceline.runtime.config import TargetConfig
from paceline.runtime.options import parse_config
from paceline.runtime.process import run_service
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from target_service.ranks import LossWatch, engine_loader

if TYPE_CHECKING:
    from paceline.costs.cost_line import CostLine
    from paceline.engine.interface import Engine
    from target_service.servicer import TargetServicer

SERVICE = pb.DESCRIPTOR.services_by_name["TargetService"].full_name


async def serve(config: TargetConfig, place: Place | None = None) -> None:
    """Load the model with the server already up, then serve until stopped.

    Args:
        config: the service's.
        place: of this process, rank 0, where torchrun has started all ranks; None: they are started here.

    Raises:
        PeerUnavailable: a rank was lost.
        PacelineError: the model can't be served, or the port is taken.
    """
    logs.use_format(config.server.log_format)
    watch = LossWatch()
    with engine_loader(config, place, watch) as load_engine:
        telemetry.configure("paceline-target", config.traces)
        metrics.configure("paceline-target", config.server, model=config.model)
        executor = Executor("target-engine")

        async def load() -> TargetServicer:
            engine = await executor.run(load_engine)
            line = await executor.run(_measure, engine)
            return _servicer(engine, executor, config, line)

        async def drain(serving: TargetServicer) -> None:
            """Wait until the sessions end, by themselves or with the engine."""
            await first_to_end(serving.scheduler.idle(), watch.loss.wait(), asyncio.wait([serving.runner]))

        try:
            add = pb_grpc.add_TargetServiceServicer_to_server
            loading = f"the target service is still loading {config.model}"
            await serve_sessions(config.server, SERVICE, load, add, drain, stop=watch.stop, loading=loading)
        finally:
            executor.close()
            telemetry.shutdown()
            metrics.shutdown()
    watch.check()


def _measure(engine: Engine) -> CostLine:
    from target_service.measuring import measure_engine

    return measure_engine(engine)


def _servicer(engine: Engine, executor: Executor, config: TargetConfig, line: CostLine) -> TargetServicer:
    from paceline.grammars.sessions import Grammars
    from target_service.servicer import TargetServicer

    load = partial(load_tokenizer, config.model, trust_remote_code=config.engine.trust_remote_code)
    grammars = Grammars(load, config.grammar)
    return TargetServicer(engine, executor, config, grammars, line)


def start(config: TargetConfig) -> Coroutine[Any, Any, None]:
    """The work of this process: it serves, or is one of the other ranks that torchrun has started.

    Raises:
        InvalidInput: torchrun has started another number of ranks than is configured.
    """
    place = place_from(os.environ, config.tensor_parallel_size)
    if place is None or place.rank == 0:
        return serve(config, place)
    return _follow(config, place)


async def _follow(config: TargetConfig, place: Place) -> None:
    logs.use_format(config.server.log_format)
    # Nothing else is on this loop.
    be_rank(config.model, config.engine, place)


def main() -> None:
    """Run the target service.

    Example: paceline target-service --model smollm2-135m --port 50053
    """
    run_service("target service", lambda: start(parse_config(TargetConfig, inspect.getdoc(main) or "")))


if __name__ == "__main__":
    main()
