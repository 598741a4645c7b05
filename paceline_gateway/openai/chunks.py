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
from paceline_gateway.openai.field_names import request_names, with_own_names
from paceline_gateway.openai.logprobs import token_text
from paceline_gateway.openai.types import MAX_CHOICES, Chunk, GenerationFields, PacelineOptions
from paceline_gateway.openai.usage import Tally, observe_reply
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import Coordinators, Upstream
from paceline_gateway.upstream.rerouting import Rerouting

PIECE_ROWS = 128
"""Positions of a prompt that are written at once: with 20 log-probabilities each, some 5 ms."""
FINISH_REASONS: Mapping[FinishReason, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ChoiceWriter(Protocol):
    """Writes one choice's part of a stream."""

    def write(self, event: GenerateEvent) -> list[Chunk]:
        """Write an event: the fields of chunks, `choices` among them; none: the client would see nothing."""

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens so far that are reasoning."""


@dataclass(frozen=True)
class Head:
    """The fields that all chunks of a reply have."""

    prefix: str
    object: str
    model: str
    system_fingerprint: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def operation(self) -> str:
        """The operation's name by the conventions for traces."""
        return genai.CHAT if self.object.startswith("chat") else genai.TEXT_COMPLETION

    def chunk(self, fields: Chunk) -> Chunk:
        """Return a whole chunk."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            **fields,
        }


@dataclass(frozen=True)
class ReplyPlan:
    """How a request is answered.

    Attributes:
        coordinators: where a generation may go on.
        upstream: where it begins.
        requests: one for each prompt.
        writers: one for each choice, counted over prompts, then samples.
        ignored_fields: names of fields that change nothing, without the body's own hints.
    """

    coordinators: Coordinators
    upstream: Upstream
    head: Head
    body: GenerationFields
    requests: Sequence[GenerateRequest]
    writers: Sequence[ChoiceWriter]
    ignored_fields: frozenset[str] = frozenset()

    @property
    def samples(self) -> int:
        """The number of choices of each prompt."""
        return self.body.n or 1


def planned_chunks(
    request: Request, body: GenerationFields, plan: Callable[[HttpCaller], Awaitable[ReplyPlan]]
) -> AsyncGenerator[Chunk, None]:
    """Plan a reply and yield its chunks. Raises as both, in the body's own names.

    Args:
        request: the HTTP request.
        body: its fields, or their translation.
        plan: plans the reply.
    """
    caller: HttpCaller = request.scope["caller"]

    async def plan_and_run() -> AsyncGenerator[Chunk, None]:
        reply = await plan(caller)
        ignore(request.scope, {*hints_of(body), *reply.ignored_fields})
        async with aclosing(run_plan(reply, caller)) as chunks:
            async for chunk in chunks:
                yield chunk

    return with_own_names(plan_and_run(), request_names(body))


async def run_plan(plan: ReplyPlan, caller: HttpCaller) -> AsyncGenerator[Chunk, None]:
    """Yield a reply's chunks; the last has no choices, and the reply's figures if the client wants them.

    With a grammar no chunk comes before the first text: until then the target may refuse the grammar, and a stream
    that has begun has no status any more.

    Raises:
        PacelineError: the failure of the first choice that fails.
    """
    tally = Tally(plan.samples, shows_tokens=plan.body.max_tokens != 0)
    observation = observe_reply(caller, plan.requests, plan.head.operation, plan.samples)
    rerouting = Rerouting(plan.coordinators, plan.upstream, caller)
    pending_chunks, is_held = list[Chunk](), plan.requests[0].sampling.grammar is not None
    with observation as meter:
        async with aclosing(run_choices(rerouting, plan.requests, plan.samples)) as events:
            async for choice in events:
                caller.on_begin()
                tally.add(choice)
                meter.take(choice)
                for event in _pieces(choice.event):
                    pending_chunks += plan.writers[choice.index].write(event)
                    is_held = is_held and isinstance(event, Started)
                    while pending_chunks and not is_held:
                        yield plan.head.chunk(pending_chunks.pop(0))
                    if isinstance(event, PromptLogprobs) or (isinstance(event, Tokens) and event.logprobs):
                        await asyncio.sleep(0)  # long reports take turns with other requests
    tally.reasoning_tokens = sum(writer.reasoning_tokens for writer in plan.writers)
    if fields := _final_fields(plan.body, tally):
        yield plan.head.chunk({"choices": []} | fields)


def _pieces(event: GenerateEvent) -> Iterator[GenerateEvent]:
    """Split a long prompt's report into pieces for which other requests may wait."""
    if not isinstance(event, PromptLogprobs):
        yield event
        return
    for start in range(0, len(event.rows), PIECE_ROWS):
        yield PromptLogprobs(event.first_position + start, event.rows[start : start + PIECE_ROWS])


def _final_fields(body: GenerationFields, tally: Tally) -> Chunk:
    """Return the fields of the last chunk: all of them in a whole answer, in a stream those that the client wants."""
    options = body.stream_options
    usage = not body.stream or (options is not None and bool(options.include_usage))
    fields: Chunk = {"usage": tally.usage, "metrics": tally.metrics} if usage else {}
    if usage or body.paceline is not None:
        fields["paceline"] = tally.paceline_object(body.paceline or PacelineOptions())
    return fields


LOGPROB_BYTES = 64
"""Bytes of a log-probability with its token, as JSON; an answer that gets longer is refused as it grows."""


def check_answer(config: GatewayConfig, body: GenerationFields, requests: Sequence[GenerateRequest]) -> None:
    """Refuse log-probabilities that a whole answer has no room for, as far as their number is certain beforehand.

    Raises:
        HttpError: naming the limit.
    """
    entries = 0
    for request in () if body.stream else requests:
        if (top := request.sampling.logprobs) is not None:
            entries += (body.n or 1) * (request.max_new_tokens or 0) * (1 + top)
        if (top := request.prompt_logprobs) is not None:
            entries += (body.n or 1) * len(request.token_ids) * (1 + top)
    limit = config.max_answer_bytes
    if LOGPROB_BYTES * entries > limit:
        raise answer_too_large(f"{entries} log-probabilities of {LOGPROB_BYTES} bytes, max_answer_bytes = {limit}")


def answer_too_large(reason: str) -> HttpError:
    """Build the error for an answer beyond its limit."""
    return refusal("logprobs", f"the answer is too large: {reason}; ask for less, or stream it", "answer_too_large")


def check_fields(body: GenerationFields, prompts: int) -> None:
    """Refuse fields that can't be combined.

    Raises:
        HttpError: naming the field.
    """
    if body.stream_options is not None and not body.stream:
        raise refusal("stream_options", "must be left out without stream")
    choices = (body.n or 1) * prompts
    if not 1 <= choices <= MAX_CHOICES:
        raise refusal("n", f"choices of all prompts together are {choices}: must be in [1, {MAX_CHOICES}]")


def round_details(event: Tokens, options: PacelineOptions | None, tokenizer: Tokenizer) -> Chunk:
    """Tell where a chunk's tokens came from, if the client wants to know.

    `replaced` has the drafts of recovered tokens, `ended_rounds` the records of the rounds that committed the tokens.
    """
    if options is None or not options.rounds:
        return {}
    details = {
        "token_ids": list(event.token_ids),
        "provenance": [provenance.value for provenance in event.provenance],
        "text_ends": list(event.text_ends),
        "replaced": [token_text(token_id, tokenizer) for token_id in event.replaced_token_ids],
        **({"ended_rounds": rounds_json(event.records)} if event.records else {}),
    }
    return {"paceline": details}
