"""`python -m target_service`: the target service as a process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
import typer

from paceline.engine.executor import Executor
from paceline.engine.parallel.launch import run_rank
from paceline.engine.parallel.place import Place, place_from
from paceline.models.tokenizer import load_tokenizer
from paceline.rpc.server import run_server
from paceline.runtime import telemetry
from paceline.runtime.config import TargetConfig, load_config
from paceline.runtime.process import keep_loaded, run_service
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from target_service.ranks import LossWatch, engine_loader

if TYPE_CHECKING:
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
    watch = LossWatch()
    with engine_loader(config, place, watch) as load:
        telemetry.configure("paceline-target")
        executor = Executor("target-engine")
        try:
            await _serve_on(executor, config, load, watch)
        finally:
            executor.close()
            telemetry.shutdown()
    watch.check()


async def _serve_on(executor: Executor, config: TargetConfig, load: Callable[[], Engine], watch: LossWatch) -> None:
    # torch and transformers take seconds to import: health answers meanwhile.
    serving: TargetServicer | None = None

    async def register(server: grpc.aio.Server) -> None:
        nonlocal serving
        engine = await executor.run(load)
        from paceline.sampling.grammar import Grammars
        from target_service.servicer import TargetServicer

        grammars = Grammars(partial(load_tokenizer, config.model, trust_remote_code=config.engine.trust_remote_code))
        serving = TargetServicer(
            engine, executor, config.engine, config.max_queue, config.step_timeout_ms / 1e3, grammars
        )
        # A service that can't step any more must not look healthy.
        serving.runner.add_done_callback(lambda _: watch.stop.set())
        pb_grpc.add_TargetServiceServicer_to_server(serving, server)
        keep_loaded()

    async def drain() -> None:
        """Sessions end by themselves, or with the engine."""
        if serving is None:
            return
        ends = [asyncio.ensure_future(each) for each in (serving.scheduler.idle(), watch.lost.wait())]
        await asyncio.wait([*ends, serving.runner], return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()

    try:
        await run_server(config.server, register, [SERVICE], watch.stop, on_drain=drain)
    finally:
        if serving is not None:
            await serving.close()


def start(config: TargetConfig) -> Coroutine[Any, Any, None]:
    """What this process is to do: serve, or be one of the other ranks that torchrun has started.

    Raises:
        InvalidInput: torchrun has started another number of ranks than are configured.
    """
    place = place_from(os.environ, config.tensor_parallel_size)
    if place is None or place.rank == 0:
        return serve(config, place)
    return _follow(config, place)


async def _follow(config: TargetConfig, place: Place) -> None:
    # Nothing else is on this loop.
    run_rank(config.model, config.engine, place)


def main(
    config: Annotated[Path | None, typer.Option(help="TOML file; flags override it.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Pulled model, hub id, folder, .gguf file or table:… name.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share the model.")
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="Most sessions waiting for room.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads; 0: every core.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest session in tokens; 0: the model's own.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sessions open at once.")] = None,
    kv_bytes: Annotated[int | None, typer.Option(help="KV budget in bytes; 0: chosen.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of the GPU's memory to use.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="Most prompt tokens in one step.")] = None,
    max_step_rows: Annotated[int | None, typer.Option(help="Most rows of one step.")] = None,
    prefix_reuse: Annotated[
        bool | None, typer.Option(help="Compute a prefix that sessions share once.", show_default="yes")
    ] = None,
    reproducible: Annotated[
        bool | None,
        typer.Option("--reproducible", help="Fixed shapes: the same bits whatever runs beside a session."),
    ] = None,
    reproducible_rows: Annotated[int | None, typer.Option(help="Rows of a reproducible step.")] = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option(help="Replay steps on a GPU as CUDA graphs.", show_default="yes")
    ] = None,
    trust_remote_code: Annotated[bool | None, typer.Option(help="Run code that comes with a model.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one.")] = None,
    health_port: Annotated[int | None, typer.Option(help="Plaintext port for health alone.")] = None,
    port_file: Annotated[Path | None, typer.Option(help="Written with host:port once SERVING.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM certificate to serve with.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Require client certificates of this CA.")] = None,
    drain_seconds: Annotated[float | None, typer.Option(help="Time that running sessions get on SIGTERM.")] = None,
) -> None:
    """Run the target service.

    Example: paceline target-service --model smollm2-135m --port 50053
    """
    flags: dict[str, object] = {
        "model": model,
        "tensor_parallel_size": tensor_parallel_size,
        "max_queue": max_queue,
        "engine.dtype": dtype,
        "engine.device": device,
        "engine.threads": threads,
        "engine.max_model_len": max_model_len,
        "engine.max_num_seqs": max_num_seqs,
        "engine.kv_bytes": kv_bytes,
        "engine.gpu_memory_utilization": gpu_memory_utilization,
        "engine.prefill_chunk": prefill_chunk,
        "engine.max_step_rows": max_step_rows,
        "engine.prefix_reuse": prefix_reuse,
        "engine.reproducible": reproducible,
        "engine.reproducible_rows": reproducible_rows,
        "engine.cuda_graphs": cuda_graphs,
        "engine.trust_remote_code": trust_remote_code,
        "server.host": host,
        "server.port": port,
        "server.health_port": health_port,
        "server.port_file": port_file,
        "server.tls_certificate": tls_certificate,
        "server.tls_key": tls_key,
        "server.tls_client_ca": tls_client_ca,
        "server.drain_seconds": drain_seconds,
    }

    run_service("target service", lambda: start(load_config(TargetConfig, config, flags)))


if __name__ == "__main__":
    typer.run(main)
