"""What commands that reach services or run a request share: their options, and a client of a coordinator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field

from paceline.client import DEFAULT_ADDRESS, Client, Generation
from paceline.protocol.errors import require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.given_files import read_text
from paceline.protocol.proposal import AUTO, MAX_PROPOSAL_NODES, Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import PeerSettings
from paceline.runtime.roles import PeerRole
from paceline.runtime.settings import Settings

API_KEY_VARIABLE = "PACELINE_API_KEY"


class TlsOptions(Settings):
    """A client's TLS files."""

    tls_ca: Path | None = Field(None, description="Trust this CA and use TLS; unset: plaintext.")
    tls_certificate: Path | None = Field(None, description="PEM certificate to show if the services demand one.")
    tls_key: Path | None = Field(None, description="PEM key of the certificate.")

    def peer(self, address: str, server_name: str | None = None) -> PeerSettings:
        """The connection to a service; `server_name`: the name in its certificate, if that isn't its host."""
        return PeerSettings(
            address=address,
            tls_ca=self.tls_ca,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            server_name=server_name,
        )


class RoleTlsOptions(TlsOptions):
    """A client's TLS files for services of several roles."""

    tls_roles: bool = Field(
        True, description="With a certificate: whether the services' certificates name roles, or hosts."
    )

    def peer_of(self, role: PeerRole, address: str) -> PeerSettings:
        """The connection to a service; with a certificate and `tls_roles`, its server name is that of its role."""
        by_role = self.tls_certificate is not None and self.tls_roles
        return self.peer(address, role.server_name if by_role else None)


class RequestOptions(TlsOptions):
    """Options of every command that runs a request."""

    max_new_tokens: int = Field(128, description="Most tokens to generate.")
    num_draft_tokens: str = Field(AUTO, description="Tokens to propose each round, or auto.")
    api_key_file: Path | None = Field(
        None, description=f"A file with the API key alone; unset: the variable {API_KEY_VARIABLE}."
    )
    timeout: float | None = Field(None, description="Seconds that the whole request may take; unset: no limit.")

    @property
    def draft_tokens(self) -> int | None:
        """The tokens to propose each round; None: auto. Raises InvalidInput."""
        text = self.num_draft_tokens
        if text == AUTO:
            return None
        limit = f"auto or an integer in [0, {MAX_PROPOSAL_NODES}]"
        require(text.lstrip("-").isdecimal(), "num_draft_tokens", text, limit)
        return int(text)


class OneRequest(RequestOptions):
    """Options of a command that runs one request and shows how it went."""

    url: str = Field(DEFAULT_ADDRESS, description="HOST:PORT of a coordinator.")
    temperature: float = Field(0.0, description="0 is greedy.")
    seed: int | None = Field(None, description="Fixes every draw; unset: drawn.")
    drafter: str = Field(
        "", description="As serve names it: auto, ngram, model, model:NAME, mtp, none; unset: the first."
    )

    def run(
        self,
        prompt: str | None,
        chat: str | None,
        *,
        acceptance: Acceptance = Acceptance.COUPLED,
        explain: bool = False,
    ) -> Generation:
        """Run the request to its end: exactly one of `prompt` and `chat` is given, and `chat` is a user's message.

        Raises:
            InvalidInput: naming option, value and limit.
        """
        require("" not in (prompt, chat), "prompt", "", "at least 1 character")
        request = GenerateRequest(
            prompt=prompt,
            messages=() if chat is None else (ChatMessage("user", chat),),
            sampling=SamplingParams(temperature=self.temperature),
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            acceptance=acceptance,
            speculation=SpeculationSettings(
                drafter=self.drafter, num_draft_tokens=self.draft_tokens, explain=explain
            ),
        )
        with open_client(self.peer(self.url), read_api_key(self.api_key_file), self.timeout) as client:
            return client.generate(request)


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


@contextmanager
def open_client(peer: PeerSettings, api_key: str | None, timeout_s: float | None) -> Iterator[Client]:
    """A client of a coordinator that has just answered."""
    with Client(peer, timeout_s=timeout_s, api_key=api_key) as client:
        client.describe_models()  # fails at once if nobody listens; a generation would wait for a retry
        yield client
