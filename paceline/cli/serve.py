"""`paceline serve`: the services on this machine, stopped together."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.app import app
from paceline.cli.options import Drafter, Dtype, Model, SpeculativeConfig, TensorParallel
from paceline.cli.support import example, need_engine
from paceline.protocol.errors import require
from paceline.protocol.proposal import AUTO
from paceline.runtime.config import COORDINATOR_PORT, DEFAULT_MODEL, DRAFT_PORT, LOCALHOST, TARGET_PORT
from paceline.runtime.process import sigterm_interrupts

if TYPE_CHECKING:
    from paceline.local.settings import ServeSettings
    from paceline.local.supervisor import SupervisedServices


@app.command(
    epilog=example(
        "paceline serve smollm2-135m --drafter ngram",
        'paceline serve --speculative-config \'{"method": "ngram", "num_speculative_tokens": 6}\'',
    )
)
def serve(
    model: Model = DEFAULT_MODEL,
    speculative_config: SpeculativeConfig = None,
    drafter: Drafter = None,
    tensor_parallel_size: TensorParallel = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest session in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sessions open at once.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of a GPU's memory, in (0, 1].")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Number format of the weights.", show_default="auto")] = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Fixed shapes: the same bits, and so the same text, on any way.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code of a hub model's repository.")
    ] = False,
    served_model_name: Annotated[str | None, typer.Option(help="The name that requests use.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of requests that bring none.", show_default="drawn")] = None,
    host: Annotated[str, typer.Option(help="Interface of the coordinator.")] = LOCALHOST,
    port: Annotated[int, typer.Option(help="The coordinator's gRPC port; 0 takes a free one.")] = COORDINATOR_PORT,
    draft_port: Annotated[int, typer.Option(help="The draft service's port.")] = DRAFT_PORT,
    target_port: Annotated[int, typer.Option(help="The target service's port.")] = TARGET_PORT,
    max_restarts: Annotated[int, typer.Option(help="Times in a row that a service which ends is started again.")] = 5,
    log_dir: Annotated[
        Path | None, typer.Option(help="Logs and configurations.", show_default="a new folder")
    ] = None,
) -> None:
    """Start the services on this machine, each a process; Ctrl-C stops them all."""
    need_engine("serve")
    from paceline.local.settings import ServeSettings
    from paceline.local.supervisor import SupervisedServices

    chosen, num_draft_tokens = _choose_drafter(drafter, speculative_config)
    settings = ServeSettings(
        model=model,
        drafter=chosen,
        num_draft_tokens=num_draft_tokens,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        dtype=dtype.value if dtype else None,
        reproducible=reproducible or None,
        trust_remote_code=trust_remote_code or None,
        served_model_name=served_model_name,
        seed=seed,
        host=host,
        port=port,
        draft_port=draft_port,
        target_port=target_port,
        max_restarts=max_restarts,
    )
    check_models(settings)
    folder = log_dir or Path(tempfile.mkdtemp(prefix="paceline-"))
    typer.echo(f"logs in {folder}")
    with contextlib.suppress(KeyboardInterrupt), sigterm_interrupts():
        _serve_until_stopped(SupervisedServices(settings, folder, typer.echo))
    typer.echo("stopped")


def _serve_until_stopped(services: SupervisedServices) -> None:
    with services:
        typer.echo(f'ready: paceline generate --prompt "Once upon a time" --coordinator {services.address}')
        services.wait()


def _choose_drafter(drafter: str | None, speculative_config: str | None) -> tuple[str, int | None]:
    from paceline.local.settings import speculative_drafter

    if speculative_config is None:
        return drafter or AUTO, None
    require(drafter is None, "drafter", drafter, "left out with speculative_config")
    return speculative_drafter(speculative_config)


def check_models(settings: ServeSettings) -> None:
    """Refuse bad settings and a model that isn't there before any process starts."""
    from paceline.local.drafter_choice import DrafterChoice
    from paceline.local.settings import check_settings
    from paceline.models.resolve import resolve

    check_settings(settings)
    resolve(settings.model)
    DrafterChoice.parse(settings.drafter).check(settings.model)
