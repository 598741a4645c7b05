"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import require, require_ids
from paceline.protocol.generation import Finished, GenerateEvent, PromptLogprobs, Started, Tokens
from paceline_gateway.openai.chunks import (
    FINISH_REASONS,
    Head,
    PlannedReply,
    check_answer,
    check_fields,
    round_details,
)
from paceline_gateway.openai.logprobs import EchoedPrompt, completion_logprobs
from paceline_gateway.openai.params import generate_request, read_sampling
from paceline_gateway.openai.types import DEFAULT_COMPLETION_TOKENS, Chunk, CompletionRequest
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.services import Services

Prompt = str | list[int]


async def plan_completion(services: Services, body: CompletionRequest, caller: HttpCaller) -> PlannedReply:
    """Read a request.

    Raises:
        HttpError, PacelineError: naming field, value and limit; or no coordinator serves.
    """
    prompts = _prompts(body.prompt)
    check_fields(body, len(prompts))
    scores = _scores_alone(body)
    upstream = await services.coordinators.choose(caller)
    services.check_model(body.model, upstream.description)
    tokenizer, max_length = services.tokenizer, upstream.description.max_length
    sampling = await read_sampling(services, body, body.logprobs)
    requests = [
        generate_request(
            body,
            await _ids(services, prompt, max_length, special=body.add_special_tokens is not False),
            sampling,
            model=upstream.description.name,
            max_new_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens + scores,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for prompt in prompts
    ]
    check_answer(services.config, body, requests)
    fingerprint = upstream.fingerprint(requests[0].acceptance)
    head = Head("cmpl", "text_completion", services.served_name(upstream.description), fingerprint)
    samples = body.n or 1
    echoed = [await _echoed(services, prompt) if body.echo else "" for prompt in prompts]
    written = ScoreWriter if scores else CompletionWriter
    writers = [written(index, body, tokenizer, echoed[index // samples]) for index in range(len(prompts) * samples)]
    return PlannedReply(services.coordinators, upstream, head, body, requests, writers)


@dataclass
class CompletionWriter:
    """Writes one choice of a completion."""

    index: int
    body: CompletionRequest
    tokenizer: Tokenizer
    echoed: str
    reasoning_tokens: int = 0

    def __post_init__(self) -> None:
        self._written = len(self.echoed)
        """Characters of the choice's text so far."""
        self._prompt: EchoedPrompt | None = None

    def written(self, event: GenerateEvent) -> list[Chunk]:
        """As `ChoiceWriter`."""
        if isinstance(event, Started):
            return self._started(event)
        if isinstance(event, PromptLogprobs):
            assert self._prompt is not None, "it was asked for"
            return [{"choices": [self._choice("") | {"logprobs": self._prompt.rows(event)}]}]
        if isinstance(event, Finished):
            return [{"choices": [self._choice(event.text, FINISH_REASONS[event.reason])]}]
        told = round_details(event, self.body.paceline, self.tokenizer)
        ids = {"token_ids": list(event.token_ids)} if self.body.return_token_ids else {}
        logprobs = None if self.body.logprobs is None else self._logprobs(event)
        self._written += len(event.text)
        if not (event.text or told or ids or logprobs):
            return []
        return [{"choices": [self._choice(event.text) | ids | {"logprobs": logprobs}]} | told]

    def _started(self, event: Started) -> list[Chunk]:
        more: dict[str, Any] = {}
        if self.body.return_token_ids:
            more["prompt_token_ids"] = list(event.prompt_token_ids)
        if self.body.echo and self.body.logprobs is not None:
            self._prompt = EchoedPrompt(event.prompt_token_ids, self.tokenizer)
            more["logprobs"] = self._prompt.first()
        return [{"choices": [self._choice(self.echoed) | more]}] if self.echoed or more else []

    def _choice(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _logprobs(self, event: Tokens) -> dict[str, Any]:
        starts = [self._written + start for start, _ in pairwise((0, *event.text_ends))]
        return completion_logprobs(event.token_ids, event.logprobs, starts, self.tokenizer)


class ScoreWriter(CompletionWriter):
    """Writes the prompt alone: a generation has a token at least, which isn't shown."""

    def written(self, event: GenerateEvent) -> list[Chunk]:  # noqa: D102
        if isinstance(event, Finished):
            return [{"choices": [self._choice("", "length")]}]
        return [] if isinstance(event, Tokens) else super().written(event)


def _scores_alone(body: CompletionRequest) -> bool:
    """Whether no token is asked for, as by those who want the prompt's log-probabilities."""
    if body.max_tokens != 0 or not body.echo:
        return False
    require(not body.min_tokens, "min_tokens", body.min_tokens, "0 with max_tokens = 0")
    return True


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """One or several, each a text or token ids."""
    if isinstance(given, str):
        return [given]
    require(len(given) > 0, "prompt", given, "at least 1 text, or 1 token id")
    several: Sequence[str | int | list[int]] = given
    ids = [each for each in several if isinstance(each, int)]
    prompts: list[Prompt] = [ids] if ids else [each for each in several if not isinstance(each, int)]
    for prompt in prompts:
        require(len(prompt) > 0, "prompt", prompt, "at least 1 character, or 1 token id, in each")
    return prompts


async def _ids(services: Services, prompt: Prompt, max_length: int, *, special: bool) -> Sequence[int]:
    if not isinstance(prompt, str):
        check = partial(require_ids, "prompt token_ids", prompt, services.tokenizer.vocab_size)
        await services.prompts.run(check, len(prompt))
        return prompt
    ids = await services.token_ids(prompt, max_length, add_special_tokens=special)
    require(len(ids) > 0, "prompt", prompt, "text of at least 1 token")
    return ids


async def _echoed(services: Services, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else await services.text(prompt, "prompt token_ids")
