"""`paceline explain`: one request, and why its rounds were drafted as they were."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.app import app
from paceline.cli.display import explanation_tables
from paceline.cli.request_options import OneRequest
from paceline.cli.support import example
from paceline.protocol.proposal import Acceptance
from paceline.runtime.options import takes_settings


@app.command(
    epilog=example(
        'paceline explain "Write a function that counts the words of a text."',
        'paceline explain --url 127.0.0.1:7000 --temperature 0.8 --drafter ngram "Name three rivers."',
    )
)
@takes_settings(OneRequest)
def explain(
    prompt: Annotated[str, typer.Argument(help="A user message, rendered with the chat template.")],
    acceptance: Annotated[Acceptance, typer.Option(help="The acceptance rule.")] = Acceptance.COUPLED,
    **flags: Any,
) -> None:
    """Run a request and show why its rounds were drafted so: costs, acceptance, and the compared choices."""
    stats = OneRequest(**flags).run(None, prompt, acceptance=acceptance, explain=True).stats
    Console().print(*explanation_tables(stats), sep="\n")
    typer.echo(f"{stats.committed} tokens in {stats.rounds} rounds, {stats.tokens_per_second:.1f} tokens per second")
