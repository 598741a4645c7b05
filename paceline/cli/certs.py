"""`paceline certs`: certificates to try mutual TLS out with."""

from __future__ import annotations

from datetime import timedelta
from importlib import util
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.app import app
from paceline.cli.support import example
from paceline.protocol.errors import PacelineError


@app.command(
    epilog=example(
        "paceline certs --out certs",
        "paceline serve --tls certs",
        "paceline doctor --tls-ca certs/ca.crt --tls-certificate certs/operator.crt --tls-key certs/operator.key",
    )
)
def certs(
    out: Annotated[Path, typer.Option(help="Folder to write to; an authority in it signs again.")],
    hours: Annotated[float, typer.Option(min=0.01, max=720, help="How long the certificates are valid.")] = 24.0,
    host: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or IP address of the services, repeatable.", show_default="localhost"),
    ] = None,
    trust_domain: Annotated[str, typer.Option(help="Trust domain of the URIs that name the roles.")] = "local",
) -> None:
    """Make an authority and a certificate for each role, for development: mutual TLS in a minute."""
    if util.find_spec("cryptography") is None:
        raise PacelineError("`paceline certs` needs the library cryptography: pip install 'paceline[tls]'")
    from paceline.local.certificates import HOSTS, write_certificates
    from paceline.runtime.roles import PeerRole

    lifetime = timedelta(hours=hours)
    write_certificates(out, hosts=host or HOSTS, trust_domain=trust_domain, lifetime=lifetime)
    for role in PeerRole:
        typer.echo(f"{out / role}.crt, .key  {role.uri(trust_domain)}")
    typer.echo(f"{out / 'ca'}.crt, .key  the authority, for development alone; the others are valid for {hours:g} h")
