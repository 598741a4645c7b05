"""`python -m draft_service`: the draft service as a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
import typer

from draft_service.drafters.names import check_drafters
from paceline.engine.executor import Executor
from paceline.rpc.server import run_server
from paceline.runtime import telemetry
from paceline.runtime.config import DraftConfig, load_config
from paceline.runtime.process import keep_loaded, run_service
from paceline.sampling import racing
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1 import draft_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from draft_service.drafters.catalogue import Catalogue
    from draft_service.servicer import DraftServicer

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["DraftService"].full_name


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
        await run_server(config.server, register, [SERVICE], stop, on_drain=drain)
    finally:
        if serving is not None:
            await serving.close()


def _load(config: DraftConfig) -> Catalogue:
    from draft_service.drafters.catalogue import build_catalogue
    from paceline.sampling import ranking

    racing.warm_up()
    ranking.warm_up()
    return build_catalogue(config)


def main(
    config: Annotated[Path | None, typer.Option(help="TOML file; flags override it.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="model:NAME, the default first; repeatable.")] = None,
    target_model: Annotated[str | None, typer.Option(help="Target whose tokenizer the drafters must share.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fast (default), auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads; 0: every core.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest session in tokens; 0: the model's own.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sessions open at once.")] = None,
    kv_bytes: Annotated[int | None, typer.Option(help="KV budget in bytes; 0: chosen.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of the GPU's memory to use.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="Most prompt tokens in one step.")] = None,
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
    """Run the draft service.

    Example: paceline draft-service --drafter model:default --target-model smollm2-135m
    """
    flags: dict[str, object] = {
        "drafters": drafter or None,
        "target_model": target_model,
        "engine.dtype": dtype,
        "engine.device": device,
        "engine.threads": threads,
        "engine.max_model_len": max_model_len,
        "engine.max_num_seqs": max_num_seqs,
        "engine.kv_bytes": kv_bytes,
        "engine.gpu_memory_utilization": gpu_memory_utilization,
        "engine.prefill_chunk": prefill_chunk,
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

    def start() -> Coroutine[Any, Any, None]:
        loaded = load_config(DraftConfig, config, flags)
        check_drafters(loaded.drafters)
        return serve(loaded)

    run_service("draft service", start)


if __name__ == "__main__":
    typer.run(main)
