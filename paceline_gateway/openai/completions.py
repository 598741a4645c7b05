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
    ReplyPlan,
    check_answer,
    check_fields,
    round_details,
)
from paceline_gateway.openai.logprobs import PromptEcho, completion_logprobs
from paceline_gateway.openai.params import generate_request, read_sampling
from paceline_gateway.openai.types import DEFAULT_COMPLETION_TOKENS, Chunk, CompletionRequest
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.services import Services

Prompt = str | list[int]


async def plan_completion(services: Services, body: CompletionRequest, caller: HttpCaller) -> ReplyPlan:
    """Plan the reply to a completion.

    Raises:
        HttpError, PacelineError: naming field, value and limit; or no coordinator serves.
    """
    prompts = _prompts(body.prompt)
    check_fields(body, len(prompts))
    is_scoring = _is_scoring(body)
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
            max_new_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens + is_scoring,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for prompt in prompts
    ]
    check_answer(services.config, body, requests)
    fingerprint = upstream.fingerprint(requests[0].acceptance)
    head = Head("cmpl", "text_completion", services.served_name(upstream.description), fingerprint)
    samples = body.n or 1
    echoes = [await _echo_text(services, prompt) if body.echo else "" for prompt in prompts]
    writer_class = ScoreWriter if is_scoring else CompletionWriter
    writers = [
        writer_class(index, body, tokenizer, echoes[index // samples]) for index in range(len(prompts) * samples)
    ]
    return ReplyPlan(services.coordinators, upstream, head, body, requests, writers)


@dataclass
class CompletionWriter:
    """Writes one choice of a completion."""

    index: int
    body: CompletionRequest
    tokenizer: Tokenizer
    echo: str
    reasoning_tokens: int = 0

    def __post_init__(self) -> None:
        self._text_length = len(self.echo)
        """Length of the choice's text so far, in characters."""
        self._prompt: PromptEcho | None = None

    def write(self, event: GenerateEvent) -> list[Chunk]:
        """Implement `ChoiceWriter`."""
        if isinstance(event, Started):
            return self._first_chunks(event)
        if isinstance(event, PromptLogprobs):
            assert self._prompt is not None, "the request wants log-probabilities of its prompt"
            return [{"choices": [self._choice("") | {"logprobs": self._prompt.rows(event)}]}]
        if isinstance(event, Finished):
            return [{"choices": [self._choice(event.text, FINISH_REASONS[event.reason])]}]
        details = round_details(event, self.body.paceline, self.tokenizer)
        ids = {"token_ids": list(event.token_ids)} if self.body.return_token_ids else {}
        logprobs = None if self.body.logprobs is None else self._logprobs(event)
        self._text_length += len(event.text)
        if not (event.text or details or ids or logprobs):
            return []
        return [{"choices": [self._choice(event.text) | ids | {"logprobs": logprobs}]} | details]

    def _first_chunks(self, event: Started) -> list[Chunk]:
        extras: dict[str, Any] = {}
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = list(event.prompt_token_ids)
        if self.body.echo and self.body.logprobs is not None:
            self._prompt = PromptEcho(event.prompt_token_ids, self.tokenizer)
            extras["logprobs"] = self._prompt.first()
        return [{"choices": [self._choice(self.echo) | extras]}] if self.echo or extras else []

    def _choice(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _logprobs(self, event: Tokens) -> dict[str, Any]:
        starts = [self._text_length + start for start, _ in pairwise((0, *event.text_ends))]
        return completion_logprobs(event.token_ids, event.logprobs, starts, self.tokenizer)


class ScoreWriter(CompletionWriter):
    """Writes the prompt alone; a generation has at least one token, which isn't shown."""

    def write(self, event: GenerateEvent) -> list[Chunk]:  # noqa: D102
        if isinstance(event, Finished):
            return [{"choices": [self._choice("", "length")]}]
        return [] if isinstance(event, Tokens) else super().write(event)


def _is_scoring(body: CompletionRequest) -> bool:
    """Whether the client wants no token, but the prompt's log-probabilities."""
    if body.max_tokens != 0 or not body.echo:
        return False
    require(not body.min_tokens, "min_tokens", body.min_tokens, "0 with max_tokens = 0")
    return True


def _prompts(field: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """Return one or several prompts, each a text or token ids."""
    if isinstance(field, str):
        return [field]
    require(len(field) > 0, "prompt", field, "at least 1 text, or 1 token id")
    entries: Sequence[str | int | list[int]] = field
    ids = [entry for entry in entries if isinstance(entry, int)]
    prompts: list[Prompt] = [ids] if ids else [entry for entry in entries if not isinstance(entry, int)]
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


async def _echo_text(services: Services, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else await services.text(prompt, "prompt token_ids")
