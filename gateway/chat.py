"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.caller import HttpCaller
from gateway.errors import refused
from gateway.logprobs import chat_logprobs
from gateway.openai_types import ChatRequest, Message
from gateway.params import generate_request
from gateway.replies import FINISH_REASONS, Chunk, Head, PlannedReply, check_fields, round_details
from gateway.reply import ReplyDelta, ReplyParser, reply_parser
from gateway.services import Services
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.generation import ChatMessage, Finished, GenerateEvent, Started, Tokens

NOT_YET = ("tools", "tool_choice", "prediction", "reasoning_effort")
"""Fields that a chat may have and this server can't honour."""


async def plan_chat(services: Services, body: ChatRequest, caller: HttpCaller) -> PlannedReply:
    """Read a request.

    Raises:
        HttpError, PacelineError: naming field, value and limit; or no coordinator serves.
    """
    check_fields(body, 1)
    _check_chat(body)
    serving = await services.coordinators.serving(caller)
    services.check_model(body.model, serving.description)
    request = generate_request(
        body,
        await chat_ids(services, body.messages, serving.description.max_length),
        services.tokenizer,
        model=serving.description.name,
        max_new_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    fingerprint = serving.fingerprint(request.acceptance)
    head = Head("chatcmpl", "chat.completion.chunk", services.served_name(serving.description), fingerprint)
    writers = [ChatWriter(index, body, services.tokenizer, reply_parser()) for index in range(body.n or 1)]
    return PlannedReply(serving, head, body, [request], writers)


async def chat_ids(services: Services, messages: Sequence[Message], max_length: int) -> tuple[int, ...]:
    """A chat's ids, ending where the answer begins.

    Raises:
        InvalidInput: more bytes than the context can hold, or content that the template has no way to write.
        Unsupported: the model has no chat template.
        HttpError: a message that only tools need.
    """
    turns = [_turn(place, message) for place, message in enumerate(messages)]
    size = sum(len(turn.content.encode()) for turn in turns)
    render = partial(services.tokenizer.render_chat, turns)
    return await services.prompts.read(render, size, max_length, "chat content bytes")


@dataclass
class ChatWriter:
    """Writes one choice of a chat."""

    index: int
    body: ChatRequest
    tokenizer: Tokenizer
    parser: ReplyParser

    def __post_init__(self) -> None:
        self._called = False
        """Whether the reply calls a tool."""

    def written(self, event: GenerateEvent) -> list[Chunk]:
        """As `ChoiceWriter`."""
        if isinstance(event, Started):
            prompt = {"prompt_token_ids": list(event.prompt_token_ids)} if self.body.return_token_ids else {}
            return [{"choices": [self._choice({"role": "assistant", "content": ""})]} | prompt]
        if isinstance(event, Finished):
            deltas = [self._delta(each) for each in (*self.parser.feed(event.text), *self.parser.finish())]
            *before, last = deltas or [{}]
            reason = "tool_calls" if self._called else FINISH_REASONS[event.reason]
            return [{"choices": [self._choice(delta)]} for delta in before] + [
                {"choices": [self._choice(last, reason)]}
            ]
        assert isinstance(event, Tokens), "a chat asks for no report of its prompt"
        return self._tokens(event)

    def _tokens(self, event: Tokens) -> list[Chunk]:
        """One chunk for each delta; what is told of the tokens goes with the first, or alone."""
        deltas = [self._delta(each) for each in self.parser.feed(event.text)]
        told = round_details(event, self.body.paceline)
        extras: dict[str, Any] = {"token_ids": list(event.token_ids)} if self.body.return_token_ids else {}
        if self.body.logprobs:
            extras["logprobs"] = chat_logprobs(event.logprobs, self.body.top_logprobs or 0, self.tokenizer)
        if not deltas and (told or extras):
            deltas = [{}]
        written = [{"choices": [self._choice(delta)]} for delta in deltas]
        if written:
            written[0]["choices"][0] |= extras
            written[0] |= told
        return written

    def _delta(self, delta: ReplyDelta) -> dict[str, Any]:
        if (call := delta.tool_call) is not None:
            self._called = True
            function = {"name": call.name} if call.name else {}
            named = {"id": call.id, "type": "function"} if call.id else {}
            return {
                "tool_calls": [{"index": call.index, **named, "function": function | {"arguments": call.arguments}}]
            }
        if delta.reasoning:
            return {"reasoning_content": delta.reasoning}
        return {"content": delta.content}

    def _choice(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _check_chat(body: ChatRequest) -> None:
    for name in NOT_YET:
        if getattr(body, name) not in (None, [], "none"):
            raise refused(name, "not supported by this server", "unsupported_parameter")
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "must be left out without logprobs")
    if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
        raise refused("max_tokens", "must be left out with max_completion_tokens, or equal to it")


def _turn(place: int, message: Message) -> ChatMessage:
    for name, value in (("tool_calls", message.tool_calls), ("reasoning_content", message.reasoning_content)):
        if value:
            raise refused(f"messages.{place}.{name}", "not supported by this server", "unsupported_parameter")
    if message.role == "tool":
        raise refused(f"messages.{place}.role", "tool is not supported by this server", "unsupported_value")
    if message.content is None:
        raise refused(f"messages.{place}.content", "must be given")
    return ChatMessage("system" if message.role == "developer" else message.role, message.text)
