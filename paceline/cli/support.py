"""What the modules of the `paceline` command share."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Annotated

import typer

from paceline.protocol.errors import PacelineError

Timeout = Annotated[float | None, typer.Option(help="Seconds that the whole request may take.", show_default="none")]
TlsCa = Annotated[Path | None, typer.Option(help="Trust this CA and use TLS.", show_default="plaintext")]
TlsCertificate = Annotated[
    Path | None, typer.Option(help="PEM certificate to show, where the services demand one.", show_default="none")
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM key of the certificate.", show_default="none")]


def example(*commands: str) -> str:
    """A help page's last lines."""
    return "\n\n".join(["[bold]Example:[/bold]", *(f"[cyan]{command}[/cyan]" for command in commands)])


def has_engine() -> bool:
    """Whether this installation can run a model."""
    return all(util.find_spec(package) is not None for package in ("torch", "transformers", "numba"))


def need_engine(command: str) -> None:
    """Refuse a command that this installation is too small for.

    Raises:
        PacelineError: saying what to install.
    """
    if not has_engine():
        raise PacelineError(f"`paceline {command}` needs the engine: pip install 'paceline[engine]'")
