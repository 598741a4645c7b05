"""`/v1/chat/completions`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.generation import Finished, FinishReason, GenerateEvent, GenerateRequest, Started, Tokens
from paceline_gateway.http.errors import refusal
from paceline_gateway.openai.chat_prompt import ChatPrompt, read_chat
from paceline_gateway.openai.chunks import (
    FINISH_REASONS,
    Head,
    ReplyPlan,
    check_answer,
    check_fields,
    round_details,
)
from paceline_gateway.openai.logprobs import chat_logprobs
from paceline_gateway.openai.params import generate_request, read_sampling
from paceline_gateway.openai.template_fields import template_settings
from paceline_gateway.openai.tools import plan_tools
from paceline_gateway.openai.types import ChatRequest, Chunk
from paceline_gateway.reply.deltas import ReplyDelta
from paceline_gateway.reply.tokens import StopWatch, with_markers
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.services import Services


async def plan_chat(services: Services, body: ChatRequest, caller: HttpCaller) -> ReplyPlan:
    """Plan the reply to a chat.

    Raises:
        HttpError, PacelineError: naming field, value and limit; or no coordinator serves.
    """
    check_fields(body, 1)
    _check_chat(body)
    upstream = await services.coordinators.choose(caller)
    services.check_model(body.model, upstream.description)
    tools = plan_tools(services.reply_format, body.tools, body.tool_choice, body.parallel_tool_calls)
    settings = template_settings(services, body)
    prompt = await read_chat(services, body.messages, tools, upstream.description.max_length, settings)
    plain_request = generate_request(
        body,
        prompt.token_ids,
        await read_sampling(services, body, (body.top_logprobs or 0) if body.logprobs else None),
        model=upstream.description.name,
        max_new_tokens=_token_limit(body, upstream.description.max_length - len(prompt.token_ids)),
    )
    prompt = replace(prompt, answer=plain_request.sampling.grammar)
    check_answer(services.config, body, [plain_request])
    request = prompt.constrain(plain_request)
    if body.prediction is not None and body.prediction.text:
        prediction = await services.prompts.tokenise_prediction(body.prediction.text, upstream.description.max_length)
        request = replace(request, prediction=prediction)
    fingerprint = upstream.fingerprint(request.acceptance)
    head = Head("chatcmpl", "chat.completion.chunk", services.served_name(upstream.description), fingerprint)
    writers = [ChatWriter(index, body, services.tokenizer, prompt, request) for index in range(body.n or 1)]
    return ReplyPlan(services.coordinators, upstream, head, body, [request], writers, prompt.ignored_fields)


@dataclass
class ChatWriter:
    """Writes one choice of a chat."""

    index: int
    body: ChatRequest
    tokenizer: Tokenizer
    prompt: ChatPrompt
    request: GenerateRequest

    def __post_init__(self) -> None:
        self._parser = self.prompt.parser
        self._stop = StopWatch(self.tokenizer, self.request.stop, self.request.stop_token_ids)
        self._reasoning = self.prompt.reasoning_tokens(self.tokenizer)
        self._has_call = False

    @property
    def reasoning_tokens(self) -> int:
        """Implement `ChoiceWriter`."""
        return self._reasoning.count

    def write(self, event: GenerateEvent) -> list[Chunk]:
        """Implement `ChoiceWriter`."""
        if isinstance(event, Started):
            prompt = {"prompt_token_ids": list(event.prompt_token_ids)} if self.body.return_token_ids else {}
            return [{"choices": [self._choice({"role": "assistant", "content": ""})]} | prompt]
        if isinstance(event, Finished):
            is_cut = event.reason is not FinishReason.STOP or self._stop.stop_reason is not None
            deltas = [*self._parser.feed(event.text), *self._parser.finish(is_cut=is_cut)]
            choices = [self._choice(self._delta(delta)) for delta in deltas] or [self._choice({})]
            choices[-1] |= self._finish_fields(event.reason)
            return [{"choices": [choice]} for choice in choices]
        assert isinstance(event, Tokens), "a chat asks for no report of its prompt"
        return self._tokens(event)

    def _tokens(self, event: Tokens) -> list[Chunk]:
        """Write one chunk for each delta; figures of the tokens go with the first, or alone."""
        self._stop.see(event.token_ids)
        self._reasoning.see(event.token_ids)
        text = with_markers(event, self.prompt.marker_tokens)
        deltas = [self._delta(delta) for delta in self._parser.feed(text)]
        details = round_details(event, self.body.paceline, self.tokenizer)
        token_fields: dict[str, Any] = {"token_ids": list(event.token_ids)} if self.body.return_token_ids else {}
        if self.body.logprobs:
            token_fields["logprobs"] = chat_logprobs(event.logprobs, self.body.top_logprobs or 0, self.tokenizer)
        if not deltas and (details or token_fields):
            deltas = [{}]
        chunks = [{"choices": [self._choice(delta)]} for delta in deltas]
        if chunks:
            chunks[0]["choices"][0] |= token_fields
            chunks[0] |= details
        return chunks

    def _delta(self, delta: ReplyDelta) -> dict[str, Any]:
        if (call := delta.tool_call) is not None:
            self._has_call = True
            identity = {"id": call.id, "type": "function"} if call.id else {}
            function = ({"name": call.name} if call.name else {}) | {"arguments": call.arguments}
            return {"tool_calls": [{"index": call.index, **identity, "function": function}]}
        if delta.reasoning:
            return {"reasoning_content": delta.reasoning}
        return {"content": delta.content}

    def _finish_fields(self, reason: FinishReason) -> dict[str, Any]:
        if reason is not FinishReason.STOP:
            return {"finish_reason": FINISH_REASONS[reason]}
        is_call = self._has_call and not self._parser.has_partial_call
        return {"finish_reason": "tool_calls" if is_call else "stop", "stop_reason": self._stop.stop_reason}

    def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _check_chat(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise refusal("top_logprobs", "must be left out without logprobs")
    if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
        raise refusal("max_tokens", "must be left out with max_completion_tokens, or equal to it")


def _token_limit(body: ChatRequest, remaining_context: int) -> int | None:
    """Return the request's limit; None: the context ends the reply first, for the same reason.

    Clients' default limits are those of other models.
    """
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return None if limit is not None and limit > remaining_context else limit
