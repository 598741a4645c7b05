"""`paceline serve`: the services on this machine, stopped together."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.app import app
from paceline.cli.support import example, need_engine
from paceline.local.drafter_choice import DrafterChoice
from paceline.local.service_process import of_services
from paceline.local.settings import ServeSettings, check_settings, speculative_drafter
from paceline.local.supervisor import SupervisedServices
from paceline.models.resolve import resolve
from paceline.protocol.errors import require
from paceline.runtime.config import DEFAULT_MODEL
from paceline.runtime.options import ConfigFile, gather, takes_settings
from paceline.runtime.process import signals_interrupt
from paceline.runtime.roles import PeerRole

VARIABLES = ("PACELINE_SERVE_SPECULATIVE_CONFIG", "PACELINE_SERVE_LOG_DIR")
"""Variables of the options that are no settings."""


@app.command(
    epilog=example(
        "paceline serve smollm2-135m --drafter ngram",
        'paceline serve --speculative-config \'{"method": "ngram", "num_speculative_tokens": 6}\'',
    )
)
@takes_settings(ServeSettings)
def serve(
    chosen_model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A pulled model, a Hugging Face id, a folder or a .gguf path.",
            show_default=DEFAULT_MODEL,
        ),
    ] = None,
    config: ConfigFile = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='JSON: {"method": "eagle3", "model": …, "num_speculative_tokens": …}; methods: auto, ngram, suffix, '
            "draft_model, medusa, eagle, eagle3, dflash, mtp, none."
        ),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Logs and configurations.", show_default="a new folder")
    ] = None,
    **flags: Any,
) -> None:
    """Start the services on this machine, each a process; Ctrl-C stops them all, a second one kills them."""
    need_engine("serve")
    _merge_arguments(flags, chosen_model, speculative_config)
    settings = gather(ServeSettings, config, flags, os.environ, VARIABLES).config
    check_models(settings)
    folder = log_dir or Path(tempfile.mkdtemp(prefix="paceline-"))
    typer.echo(f"logs in {folder}")
    if unread := of_services(os.environ):
        typer.echo(f"not read, since serve configures its services itself: {', '.join(unread)}")
    with signals_interrupt(), contextlib.suppress(KeyboardInterrupt):
        _serve_until_stopped(SupervisedServices(settings, folder, typer.echo, opens_http=settings.http))
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        typer.echo("stopped")


def _merge_arguments(flags: dict[str, Any], model: str | None, speculative_config: str | None) -> None:
    """Add the options that are no settings to the settings' flags, and refuse values that are given twice."""
    if speculative_config is not None:
        drafter, num_draft_tokens = speculative_drafter(speculative_config)
        for name, value in (("drafter", drafter), ("num_draft_tokens", num_draft_tokens)):
            require(name not in flags, name, flags.get(name), "left out with speculative_config")
            flags[name] = value
    if model is not None:
        other = flags.setdefault("model", model)
        require(other == model, "model", other, f"left out with the argument {model!r}")


def _serve_until_stopped(services: SupervisedServices) -> None:
    with services:
        command = f'paceline generate --prompt "Once upon a time" --coordinator {services.address}'
        typer.echo(f"ready: {command}{_client_flags(services.tls)}")
        if services.http_address is not None:
            typer.echo(f"OpenAI's API: http://{services.http_address}/v1")
        services.wait()


def _client_flags(tls: Path | None) -> str:
    """The flags that a client needs under mutual TLS."""
    if tls is None:
        return ""
    name = PeerRole.COORDINATOR.server_name
    files = f"--tls-ca {tls}/ca.crt --tls-certificate {tls}/client.crt --tls-key {tls}/client.key"
    return f" {files} --tls-server-name {name}"


def check_models(settings: ServeSettings) -> None:
    """Refuse bad settings and a missing model before any process starts."""
    check_settings(settings)
    resolve(settings.model)
    DrafterChoice.parse(settings.drafter).check(settings.model)
