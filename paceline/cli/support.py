"""What the modules of the `paceline` command share."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Annotated

import typer

from paceline.protocol.errors import InvalidInput, PacelineError, require
from paceline.protocol.given_files import read_text
from paceline.protocol.records import RoundRecord
from paceline.runtime.config import PeerSettings
from paceline.runtime.roles import PeerRole
from paceline.timeline.chrome import chrome_trace

API_KEY_VARIABLE = "PACELINE_API_KEY"

Timeout = Annotated[float | None, typer.Option(help="Seconds that the whole request may take.", show_default="none")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="A file with the API key alone.", show_default=f"the variable {API_KEY_VARIABLE}"),
]
TlsCa = Annotated[Path | None, typer.Option(help="Trust this CA and use TLS.", show_default="plaintext")]
TlsCertificate = Annotated[
    Path | None, typer.Option(help="PEM certificate to show if the services demand one.", show_default="none")
]
TlsRoles = Annotated[
    bool, typer.Option(help="With a certificate: whether the services' certificates name roles, or hosts.")
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM key of the certificate.", show_default="none")]


def example(*commands: str) -> str:
    """A help page's last lines."""
    return "\n\n".join(["[bold]Example:[/bold]", *(f"[cyan]{command}[/cyan]" for command in commands)])


@dataclass(frozen=True)
class ClientTls:
    """A client's TLS files; `roles`: the services' certificates name roles."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    roles: bool = True

    def peer(self, role: PeerRole, address: str) -> PeerSettings:
        """The connection to a service; with a certificate and `roles`, its server name is that of its role."""
        return PeerSettings(
            address=address,
            tls_ca=self.ca,
            tls_certificate=self.certificate,
            tls_key=self.key,
            server_name=role.server_name if self.certificate is not None and self.roles else None,
        )


def read_api_key(file: Path | None) -> str | None:
    """The API key of a file, or of the environment; None: neither has one.

    A key is never an argument, since every user of a machine sees those.

    Raises:
        InvalidInput: the file can't be read or is empty.
    """
    if file is None:
        return os.environ.get(API_KEY_VARIABLE) or None
    key = read_text("api_key_file", file).strip()
    require(key != "", "api_key_file", str(file), "a file with a key in it")
    return key


def split_commas(text: str) -> tuple[str, ...]:
    """The parts of an option between its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


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


def write_trace(file: Path, records: Sequence[RoundRecord]) -> None:
    """Write the rounds for Perfetto, and say where.

    Raises:
        InvalidInput: the file can't be written.
    """
    try:
        file.write_text(json.dumps(chrome_trace(records)))
    except OSError as error:
        raise InvalidInput.of("out", str(file), f"a file that can be written ({error.strerror})") from error
    typer.echo(f"trace: {file}, {len(records)} rounds; open it in ui.perfetto.dev", err=True)
