"""A gateway in one process before a coordinator whose reply a test writes, in any model's format.

What travels is what a coordinator sends: ids, and text without special tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import httpx2
import openai

from coordinator.text.detokenizer import Detokenizer
from paceline.models.prompts import PromptReader
from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import (
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    ModelDescription,
    Provenance,
    Started,
    Tokens,
)
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.records import GenerationStats
from paceline.rpc.retries import RetryBudget
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.app import create_app
from paceline_gateway.http.guard import RunningRequests
from paceline_gateway.reply.template_probes import read_reply_format
from paceline_gateway.upstream.coordinators import Coordinators, Upstream
from paceline_gateway.upstream.services import Services
from tests.gateway.templates import templated

ASKED: Any = [{"role": "user", "content": "q"}]
JSON = {"content-type": "application/json"}
CACHED_TOKENS = 4


def written(
    tokenizer: TransformersTokenizer,
    ids: Sequence[int],
    prompt: Sequence[int],
    stop: Sequence[str],
    ended: FinishReason,
) -> Iterator[GenerateEvent]:
    """Events of a text behind its beginning, a token at a time, as a coordinator's detokenizer makes them."""
    detokenizer = Detokenizer(tokenizer, prompt, stop)
    for token in ids:
        text = detokenizer.push(token)
        yield Tokens((token,), text, (Provenance.TARGET,), text_ends=(len(text),))
        if detokenizer.stopped:
            break
    reason = FinishReason.STOP if detokenizer.stopped else ended
    yield Finished(reason, detokenizer.flush(), GenerationStats(cached_prompt_tokens=CACHED_TOKENS))


class CannedCoordinator:
    """Answers every request with one text, a token at a time, as a coordinator's detokenizer does."""

    def __init__(self, tokenizer: TransformersTokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self.text = text
        self.asked: list[GenerateRequest] = []
        self.ended = FinishReason.STOP
        self.failure: PacelineError | None = None
        """Raised behind the first token."""
        self.budget = RetryBudget()

    async def choose(self, caller: object) -> Upstream:
        fingerprint = Fingerprint(model="m", tokenizer="t", vocab_size=9)
        description = ModelDescription("m", fingerprint, fingerprint, 10_000, (), True, True)
        return Upstream(cast(Any, self), description)

    async def tenant(self, caller: object) -> str:
        return ""

    def note_answer(self) -> None:
        pass

    @contextmanager
    def client(self, caller: object) -> Iterator[CannedCoordinator]:
        yield self

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.asked.append(request)
        yield Started(7, request.token_ids, "m")
        ids = self._tokenizer.inner.encode(self.text, add_special_tokens=False)
        for event in written(self._tokenizer, ids, request.token_ids, request.stop, self.ended):
            yield event
            if self.failure:
                raise self.failure

    def text_of(self, token_ids: Sequence[int]) -> str:
        """A prompt as the template wrote it."""
        return str(self._tokenizer.inner.decode(list(token_ids), skip_special_tokens=False))

    async def close(self) -> None:
        """Nothing is open."""


@dataclass
class Served:
    """A gateway before such a coordinator: over HTTP, and by official clients, which are loaded by whoever asks."""

    canned: Any
    http: Any

    @cached_property
    def openai(self) -> Any:
        asked: dict[str, Any] = {"api_key": "k", "max_retries": 0, "http_client": self.http}
        return openai.AsyncOpenAI(base_url="http://localhost/v1", **asked)

    @cached_property
    def anthropic(self) -> Any:
        """The client's module: 3,000 others, for some seconds."""
        return importlib.import_module("anthropic")

    @cached_property
    def claude(self) -> Any:
        asked = {"api_key": "k", "max_retries": 0, "http_client": self.http}
        return self.anthropic.AsyncAnthropic(base_url="http://localhost", **asked)


@asynccontextmanager
async def serving(template: str, text: str, *, defective: bool = False) -> AsyncIterator[Served]:
    """defective: the application will raise, which a server would log behind its answer; else it fails a test."""
    tokenizer = templated(template)
    canned = CannedCoordinator(tokenizer, text)
    prompts = PromptReader(tokenizer)
    form = read_reply_format(tokenizer)
    services = Services(GatewayConfig(), tokenizer, prompts, cast(Coordinators, canned), form)
    transport = httpx2.ASGITransport(create_app(services, RunningRequests()), raise_app_exceptions=not defective)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield Served(canned, http)
    prompts.close()
