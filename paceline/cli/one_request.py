"""What commands that run a request share: its options, and a client of a coordinator that answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.support import read_api_key
from paceline.client import Client, Generation
from paceline.protocol.errors import require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO, MAX_PROPOSAL_NODES, Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import PeerSettings

DEFAULT_MAX_NEW_TOKENS = 128

Url = Annotated[str, typer.Option(help="HOST:PORT of a coordinator.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Fixes every draw.", show_default="drawn")]
Drafter = Annotated[
    str, typer.Option(help="As serve names it: auto, ngram, model, model:NAME, mtp, none.", show_default="the first")
]
NumDraftTokens = Annotated[str, typer.Option(help="Tokens to propose each round, or auto.")]


def one_request(
    prompt: str | None,
    chat: str | None,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
    drafter: str,
    num_draft_tokens: str,
    acceptance: Acceptance = Acceptance.COUPLED,
    explain: bool = False,
) -> GenerateRequest:
    """The request of these options: exactly one of `prompt` and `chat` is given, and `chat` is a user's message.

    Raises:
        InvalidInput: naming option, value and limit.
    """
    require("" not in (prompt, chat), "prompt", "", "at least 1 character")
    return GenerateRequest(
        prompt=prompt,
        messages=() if chat is None else (ChatMessage("user", chat),),
        sampling=SamplingParams(temperature=temperature),
        seed=seed,
        max_new_tokens=max_new_tokens,
        acceptance=acceptance,
        speculation=SpeculationSettings(
            drafter=drafter, num_draft_tokens=draft_tokens(num_draft_tokens), explain=explain
        ),
    )


def draft_tokens(text: str) -> int | None:
    """The value of `--num-draft-tokens`; None: auto. Raises InvalidInput."""
    if text == AUTO:
        return None
    limit = f"auto or an integer in [0, {MAX_PROPOSAL_NODES}]"
    require(text.lstrip("-").isdecimal(), "num_draft_tokens", text, limit)
    return int(text)


def run_request(
    request: GenerateRequest, peer: PeerSettings, api_key_file: Path | None, timeout_s: float | None
) -> Generation:
    """Run a request at a coordinator, and wait for its end."""
    with open_client(peer, read_api_key(api_key_file), timeout_s) as client:
        return client.generate(request)


@contextmanager
def open_client(peer: PeerSettings, api_key: str | None, timeout_s: float | None) -> Iterator[Client]:
    """A client of a coordinator that has just answered."""
    with Client(peer, timeout_s=timeout_s, api_key=api_key) as client:
        client.describe_models()  # fails at once if nobody listens; a generation would wait for a retry
        yield client
