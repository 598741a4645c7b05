"""`paceline trace`: where a request's time went, round by round, in the terminal or as a file for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.app import app
from paceline.cli.gantt import gantt
from paceline.cli.generate import DEFAULT_MAX_NEW_TOKENS, draft_tokens
from paceline.cli.support import (
    ApiKeyFile,
    Timeout,
    TlsCa,
    TlsCertificate,
    TlsKey,
    example,
    read_api_key,
    write_trace,
)
from paceline.client import DEFAULT_ADDRESS, Client
from paceline.protocol.errors import require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO
from paceline.protocol.records import RoundRecord
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import PeerSettings
from paceline.timeline.saved import read_rounds


@app.command(
    epilog=example(
        'paceline trace --chat "Name three rivers."',
        'paceline trace --prompt "Once upon a time" --out trace.json   # open it in ui.perfetto.dev',
        "paceline trace --request response.json --out trace.json",
    )
)
def trace(
    request: Annotated[
        Path | None, typer.Option(help="A saved response with its rounds, of HTTP or of generate --json --rounds.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Run this: plain text to go on from.")] = None,
    chat: Annotated[str | None, typer.Option(help="Run this: a user message.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.", show_default="none")] = None,
    show: Annotated[
        bool | None, typer.Option("--gantt/--no-gantt", help="Show the rounds here.", show_default="without --out")
    ] = None,
    url: Annotated[str, typer.Option(help="HOST:PORT of a coordinator.")] = DEFAULT_ADDRESS,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = DEFAULT_MAX_NEW_TOKENS,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Fixes every draw.", show_default="drawn")] = None,
    drafter: Annotated[str, typer.Option(help="Which drafter, or none.", show_default="the first")] = "",
    num_draft_tokens: Annotated[str, typer.Option(help="Tokens to propose each round, or auto.")] = AUTO,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    api_key_file: ApiKeyFile = None,
    timeout: Timeout = None,
) -> None:
    """Show a request's rounds on a time axis: one that was saved, or one that is run now."""
    given = sum(value is not None for value in (request, prompt, chat))
    require(given == 1, "inputs given", given, "exactly 1 of --request, --prompt and --chat")
    if request is not None:
        records: Sequence[RoundRecord] = read_rounds(request)
    else:
        require(prompt != "" and chat != "", "prompt", "", "at least 1 character")
        asked = GenerateRequest(
            prompt=prompt,
            messages=() if chat is None else (ChatMessage("user", chat),),
            sampling=SamplingParams(temperature=temperature),
            seed=seed,
            max_new_tokens=max_new_tokens,
            speculation=SpeculationSettings(drafter=drafter, num_draft_tokens=draft_tokens(num_draft_tokens)),
        )
        peer = PeerSettings(address=url, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key)
        with Client(peer, timeout_s=timeout, api_key=read_api_key(api_key_file)) as client:
            client.describe_models()  # fails at once where nobody listens
            records = client.generate(asked).stats.records
    if out is not None:
        write_trace(out, records)
    if show or (show is None and out is None):
        console = Console()
        console.print(gantt(records, console.width))
