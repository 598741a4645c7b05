"""From a request's choices to the chunks of OpenAI's streams; a whole reply is its chunks put together."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.generation import (
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    PromptLogprobs,
    Started,
    Tokens,
)
from paceline.runtime import genai
from paceline.runtime.gateway_config import GatewayConfig
from paceline.timeline.saved import rounds_json
from paceline_gateway.http.errors import HttpError, refusal
from paceline_gateway.http.ignored_fields import hints_of, ignore
from paceline_gateway.openai.choices import run_choices
from paceline_gateway.openai.field_names import request_names, told_in_own_names
from paceline_gateway.openai.logprobs import token_text
from paceline_gateway.openai.types import MAX_CHOICES, Chunk, GenerationFields, PacelineOptions
from paceline_gateway.openai.usage import Tally, observed
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import Coordinators, Upstream
from paceline_gateway.upstream.rerouting import Rerouting

PIECE_ROWS = 128
"""Positions of a prompt at once: with 20 log-probabilities each some 5 ms."""
FINISH_REASONS: Mapping[FinishReason, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ChoiceWriter(Protocol):
    """Writes one choice's part of a stream."""

    def written(self, event: GenerateEvent) -> list[Chunk]:
        """What an event adds: keys of chunks, `choices` among them; none: nothing that the client would see."""

    @property
    def reasoning_tokens(self) -> int:
        """Of the tokens so far, those of reasoning."""


@dataclass(frozen=True)
class Head:
    """What all chunks of a reply have."""

    prefix: str
    object: str
    model: str
    system_fingerprint: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def operation(self) -> str:
        """What the conventions for traces call it."""
        return genai.CHAT if self.object.startswith("chat") else genai.TEXT_COMPLETION

    def chunk(self, of_choice: Chunk) -> Chunk:
        """A whole chunk."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            **of_choice,
        }


@dataclass(frozen=True)
class PlannedReply:
    """A request that was read, and what answers it.

    Attributes:
        coordinators: where it may go on.
        upstream: where it begins.
        requests: one for each prompt.
        writers: one for each choice: over prompts, then samples.
        ignored: names of fields that change nothing, beside the body's own hints.
    """

    coordinators: Coordinators
    upstream: Upstream
    head: Head
    body: GenerationFields
    requests: Sequence[GenerateRequest]
    writers: Sequence[ChoiceWriter]
    ignored: frozenset[str] = frozenset()

    @property
    def samples(self) -> int:
        """Choices of each prompt."""
        return self.body.n or 1


def planned_chunks(
    request: Request, body: GenerationFields, plan: Callable[[HttpCaller], Awaitable[PlannedReply]]
) -> AsyncGenerator[Chunk, None]:
    """A reply's chunks, its request read first. Raises as both, in the body's own names.

    Args:
        request: what is answered.
        body: its fields, or what they were translated to.
        plan: reads them.
    """
    caller: HttpCaller = request.scope["caller"]

    async def made() -> AsyncGenerator[Chunk, None]:
        reply = await plan(caller)
        ignore(request.scope, {*hints_of(body), *reply.ignored})
        async with aclosing(chunks(reply, caller)) as stream:
            async for chunk in stream:
                yield chunk

    return told_in_own_names(made(), request_names(body))


async def chunks(plan: PlannedReply, caller: HttpCaller) -> AsyncGenerator[Chunk, None]:
    """Yield a reply's chunks; the last has no choices and says what the reply took, if that was asked for.

    With a grammar none comes before the first text: until then the target may refuse it, and a stream that has begun
    has no status any more.

    Raises:
        PacelineError: of the first choice that fails.
    """
    tally = Tally(plan.samples, shows_tokens=plan.body.max_tokens != 0)
    observing = observed(caller, plan.requests, plan.head.operation, plan.samples)
    generating = Rerouting(plan.coordinators, plan.upstream, caller)
    held, holds = list[Chunk](), plan.requests[0].sampling.grammar is not None
    with observing as meter:
        async with aclosing(run_choices(generating, plan.requests, plan.samples)) as events:
            async for choice in events:
                caller.on_begin()
                tally.add(choice)
                meter.take(choice)
                for event in _pieces(choice.event):
                    held += plan.writers[choice.index].written(event)
                    holds = holds and isinstance(event, Started)
                    while held and not holds:
                        yield plan.head.chunk(held.pop(0))
                    if isinstance(event, PromptLogprobs) or (isinstance(event, Tokens) and event.logprobs):
                        await asyncio.sleep(0)  # what is much takes its turns with others
    tally.reasoning_tokens = sum(writer.reasoning_tokens for writer in plan.writers)
    if closing := _closing(plan.body, tally):
        yield plan.head.chunk({"choices": []} | closing)


def _pieces(event: GenerateEvent) -> Iterator[GenerateEvent]:
    """What is known of a long prompt, as much at a time as others may wait for."""
    if not isinstance(event, PromptLogprobs):
        yield event
        return
    for start in range(0, len(event.rows), PIECE_ROWS):
        yield PromptLogprobs(event.first_position + start, event.rows[start : start + PIECE_ROWS])


def _closing(body: GenerationFields, tally: Tally) -> Chunk:
    """What the last chunk says: everything of a reply that is sent whole; of a stream what was asked for."""
    options = body.stream_options
    usage = not body.stream or (options is not None and bool(options.include_usage))
    closing: Chunk = {"usage": tally.usage, "metrics": tally.metrics} if usage else {}
    if usage or body.paceline is not None:
        closing["paceline"] = tally.told(body.paceline or PacelineOptions())
    return closing


LOGPROB_BYTES = 64
"""Of a log-probability with its token, as it is written; an answer that gets longer is refused as it grows."""


def check_answer(config: GatewayConfig, body: GenerationFields, requests: Sequence[GenerateRequest]) -> None:
    """Refuse log-probabilities that a whole answer has no room for, as far as they are known before.

    Raises:
        HttpError: naming the limit.
    """
    entries = 0
    for request in () if body.stream else requests:
        if (top := request.sampling.logprobs) is not None:
            entries += (body.n or 1) * (request.max_new_tokens or 0) * (1 + top)
        if (top := request.prompt_logprobs) is not None:
            entries += (body.n or 1) * len(request.token_ids) * (1 + top)
    size, most = LOGPROB_BYTES * entries, config.max_answer_bytes
    if size > most:
        raise too_large_an_answer(f"{entries} log-probabilities of {LOGPROB_BYTES} bytes, max_answer_bytes = {most}")


def too_large_an_answer(why: str) -> HttpError:
    """An answer beyond its limit."""
    return refusal("logprobs", f"the answer is too large: {why}; ask for less, or stream it", "answer_too_large")


def check_fields(body: GenerationFields, prompts: int) -> None:
    """Refuse what the fields say together.

    Raises:
        HttpError: naming the field.
    """
    if body.stream_options is not None and not body.stream:
        raise refusal("stream_options", "must be left out without stream")
    choices = (body.n or 1) * prompts
    if not 1 <= choices <= MAX_CHOICES:
        raise refusal("n", f"choices of all prompts together are {choices}: must be in [1, {MAX_CHOICES}]")


def round_details(event: Tokens, asked: PacelineOptions | None, tokenizer: Tokenizer) -> Chunk:
    """Where a chunk's tokens came from, if that was asked for.

    `replaced` has the drafts of the recovered ones, `ended_rounds` the records of the rounds that committed them.
    """
    if asked is None or not asked.rounds:
        return {}
    shown = {
        "token_ids": list(event.token_ids),
        "provenance": [provenance.value for provenance in event.provenance],
        "text_ends": list(event.text_ends),
        "replaced": [token_text(token_id, tokenizer) for token_id in event.replaced_token_ids],
        **({"ended_rounds": rounds_json(event.records)} if event.records else {}),
    }
    return {"paceline": shown}
