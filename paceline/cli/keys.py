"""`paceline keys`: the API keys that a coordinator accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from paceline.access.keys import ApiKey, ApiKeys, KeyLimits, hash_of, load_keys, new_key, save_keys, tenant_of
from paceline.cli.support import example
from paceline.runtime.sources import refusal

SHOWN_DIGITS = 12
KeyFile = Annotated[Path, typer.Option("--file", help="The key file, as the coordinator's --api-keys names it.")]

keys = typer.Typer(
    no_args_is_help=True,
    help="The API keys that a coordinator accepts; it rereads the file within a second.",
    epilog=example("paceline keys new alice --file keys.json --requests-per-minute 60"),
)


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="The key's name in lists and logs.")],
    file: KeyFile,
    tenant: Annotated[str | None, typer.Option(help="The key's owner.", show_default="the name")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(show_default="no limit")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Prompt and generated tokens together.", show_default="no limit")
    ] = None,
    max_concurrent_requests: Annotated[int | None, typer.Option(show_default="no limit")] = None,
) -> None:
    """Add a key and print it; this is the only time, since the file has only its hash."""
    key = new_key()
    try:
        limits = KeyLimits(
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            max_concurrent_requests=max_concurrent_requests,
        )
        entry = ApiKey(name=name, sha256=hash_of(key), tenant=tenant, limits=limits)
    except ValidationError as error:
        raise refusal(error) from error
    current = load_keys(file) if file.exists() else ApiKeys()
    save_keys(current.with_key(entry), file)
    typer.echo(key)


@keys.command("list")
def list_(file: KeyFile) -> None:
    """Show every key's name, owner, limits, and the beginning of its hash."""
    table = Table("name", "tenant", "sha256", *(field.replace("_", " ") for field in KeyLimits.model_fields))
    for key in load_keys(file).keys:
        limits = ("-" if limit is None else str(limit) for limit in key.limits.model_dump().values())
        table.add_row(key.name, tenant_of(key), key.sha256[:SHOWN_DIGITS], *limits)
    Console().print(table)


@keys.command()
def revoke(name: Annotated[str, typer.Argument(help="The key's name.")], file: KeyFile) -> None:
    """Remove a key: its running requests end within a second, and new ones are refused."""
    save_keys(load_keys(file).without_key(name), file)
    typer.echo(f"revoked {name}")
