"""Routes of Anthropic's Messages and OpenAI's Responses, which translate to a chat and back.

Their events have names (`event:`), and an error has the shape of its API.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Protocol, TypedDict

from fastapi import APIRouter, Body, Request
from pydantic import ValidationError
from starlette.responses import Response

from paceline_gateway.dialects.anthropic_reply import MessageEvents, error_of, message_of
from paceline_gateway.dialects.anthropic_request import chat_of_messages, prompt_of_messages
from paceline_gateway.dialects.anthropic_types import AnthropicErrorReply, CountTokensRequest, MessagesRequest
from paceline_gateway.dialects.responses_reply import ResponseEvents, response_of
from paceline_gateway.dialects.responses_request import chat_of_response
from paceline_gateway.dialects.responses_types import ResponsesRequest
from paceline_gateway.dialects.translation import ChatTranslation
from paceline_gateway.http.answers import STREAM_RESPONSES, EventStream, WholeReply, event_json
from paceline_gateway.http.bodies import JsonRoute
from paceline_gateway.http.errors import ERROR_RESPONSES, FAILURES, HttpError, as_http, invalid_body
from paceline_gateway.http.ignored_fields import hints_of, ignore
from paceline_gateway.http.shapes import RequestShape
from paceline_gateway.openai.chat import plan_chat
from paceline_gateway.openai.chat_prompt import read_chat
from paceline_gateway.openai.chunks import ReplyPlan, planned_chunks
from paceline_gateway.openai.field_names import in_own_names, request_path, with_own_names
from paceline_gateway.openai.folding import FoldedChat, fold
from paceline_gateway.openai.template_fields import template_settings, thinking_switch
from paceline_gateway.openai.tools import plan_tools
from paceline_gateway.openai.types import ChatRequest, Chunk
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.services import Services

ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**description, "model": AnthropicErrorReply} for status, description in ERROR_RESPONSES.items()
}


class AnthropicError(HttpError):
    """An error as Anthropic's clients read it."""

    @property
    def body(self) -> dict[str, Any]:  # noqa: D102
        return error_of(self.status, super().body)


class DialectEvents(Protocol):
    """Translates a stream of chat chunks to another API's events."""

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Translate a chunk."""

    def finish(self) -> list[dict[str, Any]]:
        """Return the events behind the last chunk."""

    def fail(self, status: int, error: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Translate an error, which ends the stream: its status in HTTP, and OpenAI's body."""


def dialect_routes(services: Services) -> APIRouter:
    """Build the routes over services."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(ANTHROPIC_PATH, responses=ANTHROPIC_ERRORS | STREAM_RESPONSES)
    async def messages(request: Request, body: Annotated[MessagesRequest, Body()]) -> Response:
        """Anthropic's Messages; streamed as server-sent events with `stream`."""
        events = MessageEvents()

        def count(reply: ReplyPlan) -> None:
            events.input_tokens = len(reply.requests[0].token_ids)

        translation = chat_of_messages(body, **_reasoning_options(services))
        chunks = _with_anthropic_errors(_chunks(services, body, translation, request, count))
        if body.stream:
            return _stream(services, chunks, events)
        return WholeReply(lambda: _whole_reply(services, chunks, message_of))

    @router.post(f"{ANTHROPIC_PATH}/count_tokens", responses=ANTHROPIC_ERRORS)
    async def count_tokens(request: Request, body: Annotated[CountTokensRequest, Body()]) -> dict[str, int]:
        """The number of tokens of a prompt."""
        return {"input_tokens": await _count(services, body, request)}

    @router.post("/v1/responses", responses=STREAM_RESPONSES)
    async def responses(request: Request, body: Annotated[ResponsesRequest, Body()]) -> Response:
        """OpenAI's Responses, which are not stored; streamed as server-sent events with `stream`."""
        chunks = _chunks(services, body, chat_of_response(body), request)
        if body.stream:
            return _stream(services, chunks, ResponseEvents(body))
        return WholeReply(lambda: _whole_reply(services, chunks, lambda completion: response_of(body, completion)))

    return router


def error_in_dialect(path: str, error: HttpError) -> HttpError:
    """Return an error in the shape of the API that a path belongs to."""
    if path != ANTHROPIC_PATH and not path.startswith(f"{ANTHROPIC_PATH}/"):
        return error
    return AnthropicError(error.status, error.message, error.type, error.param, error.code, error.headers)


class _ReasoningOptions(TypedDict):
    has_reasoning: bool
    switch: str | None


def _reasoning_options(services: Services) -> _ReasoningOptions:
    """Return whether the model reasons, and the variable that can switch that off."""
    switch = thinking_switch(services.tokenizer.template_variables)
    return {"has_reasoning": services.reply_format.reasoning is not None, "switch": switch}


def _chunks(
    services: Services,
    body: RequestShape,
    translation: ChatTranslation,
    request: Request,
    on_plan: Callable[[ReplyPlan], None] = lambda reply: None,
) -> AsyncGenerator[Chunk, None]:
    chat = _chat(translation)

    async def plan(caller: HttpCaller) -> ReplyPlan:
        reply = await plan_chat(services, chat, caller)
        on_plan(reply)
        return replace(reply, ignored_fields=_ignored_fields(body, translation, reply.ignored_fields))

    return with_own_names(planned_chunks(request, chat, plan), translation.names)


def _ignored_fields(body: RequestShape, translation: ChatTranslation, chat_fields: frozenset[str]) -> frozenset[str]:
    """Return all fields of a request that change nothing, in its own names."""
    own_names = {request_path(name, translation.names) for name in chat_fields}
    return translation.ignored_fields | own_names | {*hints_of(body)}


def _chat(translation: ChatTranslation) -> ChatRequest:
    """Check a translated request as any other."""
    try:
        return ChatRequest.model_validate(translation.chat)
    except ValidationError as error:
        details = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise in_own_names(invalid_body(details), translation.names) from error


async def _whole_reply(
    services: Services, chunks: AsyncGenerator[Chunk, None], translate: Callable[[Chunk], Chunk]
) -> Chunk:
    return translate(await fold(chunks, FoldedChat, "chat.completion", services.config.max_answer_bytes))


def _stream(services: Services, chunks: AsyncGenerator[Chunk, None], events: DialectEvents) -> Response:
    async def event_bytes() -> AsyncGenerator[bytes, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                if batch := events.feed(chunk):
                    yield _event_batch(batch)
        yield _event_batch(events.finish())

    def error_bytes(error: HttpError) -> bytes:
        openai_error = HttpError(error.status, error.message, error.type, error.param, error.code)
        return _event_batch(events.fail(error.status, openai_error.body))

    reader_timeout_s = services.config.reader_timeout_s
    return EventStream(event_bytes(), reader_timeout_s=reader_timeout_s, terminator=b"", error_event=error_bytes)


def _event_batch(events: list[dict[str, Any]]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), event_json(event)) for event in events)


async def _with_anthropic_errors(chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """Yield the same chunks; an error has Anthropic's shape."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except FAILURES as error:
        raise error_in_dialect(ANTHROPIC_PATH, as_http(error)) from error


async def _count(services: Services, body: CountTokensRequest, request: Request) -> int:
    upstream = await services.coordinators.choose(request.scope["caller"])
    services.check_model(body.model, upstream.description)
    translation = prompt_of_messages(body, **_reasoning_options(services))
    chat = _chat(translation)
    try:
        tools = plan_tools(services.reply_format, chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        settings = template_settings(services, chat)
        prompt = await read_chat(services, chat.messages, tools, upstream.description.max_length, settings)
    except FAILURES as error:
        raise in_own_names(error, translation.names) from error
    ignore(request.scope, _ignored_fields(body, translation, prompt.ignored_fields))
    return len(prompt.token_ids)
