"""`paceline explain`: one request, and why its rounds were drafted as they were."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.app import app
from paceline.cli.explanation import explanation_tables
from paceline.cli.one_request import (
    DEFAULT_MAX_NEW_TOKENS,
    Drafter,
    MaxNewTokens,
    NumDraftTokens,
    Seed,
    Temperature,
    Url,
    one_request,
    run_request,
)
from paceline.cli.support import ApiKeyFile, Timeout, TlsCa, TlsCertificate, TlsKey, example
from paceline.client import DEFAULT_ADDRESS
from paceline.protocol.proposal import AUTO, Acceptance
from paceline.runtime.config import PeerSettings


@app.command(
    epilog=example(
        'paceline explain "Write a function that counts the words of a text."',
        'paceline explain --url 127.0.0.1:7000 --temperature 0.8 --drafter ngram "Name three rivers."',
    )
)
def explain(
    prompt: Annotated[str, typer.Argument(help="A user message, rendered with the chat template.")],
    url: Url = DEFAULT_ADDRESS,
    max_new_tokens: MaxNewTokens = DEFAULT_MAX_NEW_TOKENS,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    acceptance: Annotated[Acceptance, typer.Option(help="The acceptance rule.")] = Acceptance.COUPLED,
    drafter: Drafter = "",
    num_draft_tokens: NumDraftTokens = AUTO,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    api_key_file: ApiKeyFile = None,
    timeout: Timeout = None,
) -> None:
    """Run a request and show why its rounds were drafted so: costs, acceptance, and the compared choices."""
    request = one_request(
        None,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        acceptance=acceptance,
        explain=True,
    )
    peer = PeerSettings(address=url, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key)
    stats = run_request(request, peer, api_key_file, timeout).stats
    Console().print(*explanation_tables(stats), sep="\n")
    typer.echo(f"{stats.committed} tokens in {stats.rounds} rounds, {stats.tokens_per_second:.1f} tokens per second")
