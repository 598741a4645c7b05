"""`paceline explain`: one request, and why it was drafted for as it was."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.app import app
from paceline.cli.explanation import explanation_tables
from paceline.cli.generate import DEFAULT_MAX_NEW_TOKENS, draft_tokens
from paceline.cli.support import ApiKeyFile, Timeout, TlsCa, TlsCertificate, TlsKey, example, read_api_key
from paceline.client import DEFAULT_ADDRESS, Client
from paceline.protocol.errors import require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO, Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import PeerSettings


@app.command(
    epilog=example(
        'paceline explain "Write a function that counts the words of a text."',
        'paceline explain --url 127.0.0.1:7000 --temperature 0.8 --drafter ngram "Name three rivers."',
    )
)
def explain(
    prompt: Annotated[str, typer.Argument(help="A user message, rendered with the chat template.")],
    url: Annotated[str, typer.Option(help="HOST:PORT of a coordinator.")] = DEFAULT_ADDRESS,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = DEFAULT_MAX_NEW_TOKENS,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Fixes every draw.", show_default="drawn")] = None,
    acceptance: Annotated[Acceptance, typer.Option(help="The rule.")] = Acceptance.COUPLED,
    drafter: Annotated[str, typer.Option(help="Which drafter, or none.", show_default="the first")] = "",
    num_draft_tokens: Annotated[str, typer.Option(help="Tokens to propose each round, or auto.")] = AUTO,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    api_key_file: ApiKeyFile = None,
    timeout: Timeout = None,
) -> None:
    """Run a request and show why it was drafted for so: costs, acceptance, what was compared and what was chosen."""
    require(prompt != "", "prompt", prompt, "at least 1 character")
    request = GenerateRequest(
        messages=(ChatMessage("user", prompt),),
        sampling=SamplingParams(temperature=temperature),
        seed=seed,
        max_new_tokens=max_new_tokens,
        acceptance=acceptance,
        speculation=SpeculationSettings(
            drafter=drafter, num_draft_tokens=draft_tokens(num_draft_tokens), explain=True
        ),
    )
    peer = PeerSettings(address=url, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key)
    with Client(peer, timeout_s=timeout, api_key=read_api_key(api_key_file)) as client:
        client.describe_models()  # fails at once where nobody listens
        generation = client.generate(request)
    stats = generation.stats
    Console().print(*explanation_tables(stats), sep="\n")
    typer.echo(f"{stats.committed} tokens in {stats.rounds} rounds, {stats.tokens_per_second:.1f} tokens per second")
