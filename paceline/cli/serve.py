"""`paceline serve`: the services on this machine, stopped together."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.app import app
from paceline.cli.support import example, need_engine
from paceline.local.drafter_choice import DrafterChoice
from paceline.local.settings import ServeSettings, check_settings, speculative_drafter
from paceline.local.supervisor import SupervisedServices
from paceline.models.resolve import resolve
from paceline.protocol.errors import require
from paceline.runtime.config import DEFAULT_MODEL
from paceline.runtime.options import takes_settings
from paceline.runtime.process import sigterm_interrupts
from paceline.runtime.roles import Role


@app.command(
    epilog=example(
        "paceline serve smollm2-135m --drafter ngram",
        'paceline serve --speculative-config \'{"method": "ngram", "num_speculative_tokens": 6}\'',
    )
)
@takes_settings(ServeSettings, without=("num_draft_tokens",))
def serve(
    model: Annotated[
        str, typer.Argument(help="A pulled model, a Hugging Face id, a folder or a .gguf path.")
    ] = DEFAULT_MODEL,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='JSON: {"method": "auto"|"ngram"|"draft_model"|"none", "model": …, "num_speculative_tokens": …}.'
        ),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Logs and configurations.", show_default="a new folder")
    ] = None,
    **flags: Any,
) -> None:
    """Start the services on this machine, each a process; Ctrl-C stops them all."""
    need_engine("serve")
    if speculative_config is not None:
        given = flags.get("drafter")
        require(given is None, "drafter", given, "left out with speculative_config")
        flags["drafter"], flags["num_draft_tokens"] = speculative_drafter(speculative_config)
    settings = ServeSettings(model=model, **flags)
    check_models(settings)
    folder = log_dir or Path(tempfile.mkdtemp(prefix="paceline-"))
    typer.echo(f"logs in {folder}")
    with contextlib.suppress(KeyboardInterrupt), sigterm_interrupts():
        _serve_until_stopped(SupervisedServices(settings, folder, typer.echo))
    typer.echo("stopped")


def _serve_until_stopped(services: SupervisedServices) -> None:
    with services:
        command = f'paceline generate --prompt "Once upon a time" --coordinator {services.address}'
        typer.echo(f"ready: {command}{_client_flags(services.tls)}")
        services.wait()


def _client_flags(tls: Path | None) -> str:
    """What a client adds to its command under mutual TLS."""
    if tls is None:
        return ""
    name = Role.COORDINATOR.server_name
    files = f"--tls-ca {tls}/ca.crt --tls-certificate {tls}/client.crt --tls-key {tls}/client.key"
    return f" {files} --tls-server-name {name}"


def check_models(settings: ServeSettings) -> None:
    """Refuse bad settings and a model that isn't there before any process starts."""
    check_settings(settings)
    resolve(settings.model)
    DrafterChoice.parse(settings.drafter).check(settings.model)
