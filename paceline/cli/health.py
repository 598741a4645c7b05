"""`paceline doctor`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.app import EXIT_ERROR, app
from paceline.cli.support import TlsCa, example
from paceline.client import DEFAULT_ADDRESS
from paceline.protocol.proposal import NONE
from paceline.runtime.config import DRAFT_PORT, LOCALHOST, TARGET_PORT


@app.command(epilog=example("paceline doctor", f"paceline doctor --coordinator {DEFAULT_ADDRESS} --draft none"))
def doctor(
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")] = DEFAULT_ADDRESS,
    draft: Annotated[
        str, typer.Option(help="HOST:PORT of the draft service, or none.")
    ] = f"{LOCALHOST}:{DRAFT_PORT}",
    target: Annotated[str, typer.Option(help="HOST:PORT of the target service.")] = f"{LOCALHOST}:{TARGET_PORT}",
    tls_ca: TlsCa = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each answer.")] = 3.0,
) -> None:
    """Check versions, devices, models and services; the exit code says whether all is well."""
    from paceline.cli.doctor import Addresses, examine

    console = Console(soft_wrap=True)
    marks = {True: "[green]ok[/green]  ", False: "[red]BAD[/red] ", None: "    "}
    well = True
    addresses = Addresses(coordinator, None if draft == NONE else draft, target, tls_ca, timeout)
    for finding in examine(addresses):
        well &= finding.ok is not False
        console.print(f"{marks[finding.ok]} [bold]{finding.subject:<22}[/bold]", end="")
        console.print(finding.detail, markup=False, highlight=False)
    console.print("all is well" if well else "not well: see the lines marked BAD")
    raise typer.Exit(0 if well else EXIT_ERROR)
