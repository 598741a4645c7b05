"""Anthropic's and OpenAI's further APIs: routes that translate to a chat and back.

Events are named (`event:`), and an error has the shape of the API that it answers.
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
from paceline_gateway.dialects.translation import Translated
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
    status: {**described, "model": AnthropicErrorReply} for status, described in ERROR_RESPONSES.items()
}


class AnthropicError(HttpError):
    """An error as Anthropic's clients read it."""

    @property
    def body(self) -> dict[str, Any]:  # noqa: D102
        return error_of(self.status, super().body)


class DialectEvents(Protocol):
    """A stream of chat chunks as another API's events."""

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Events of a chunk."""

    def finish(self) -> list[dict[str, Any]]:
        """Events behind the last chunk."""

    def fail(self, status: int, error: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Events of an error, which ends the stream: its status in HTTP, and OpenAI's body."""


def dialect_routes(services: Services) -> APIRouter:
    """The routes over services."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(ANTHROPIC_PATH, responses=ANTHROPIC_ERRORS | STREAM_RESPONSES)
    async def messages(request: Request, body: Annotated[MessagesRequest, Body()]) -> Response:
        """Anthropic's Messages; streamed as server-sent events with `stream`."""
        events = MessageEvents()

        def count(reply: ReplyPlan) -> None:
            events.input_tokens = len(reply.requests[0].token_ids)

        asked = chat_of_messages(body, **_reasoning(services))
        made = _anthropic(_chunks(services, body, asked, request, count))
        if body.stream:
            return _stream(services, made, events)
        return WholeReply(lambda: _whole(services, made, message_of))

    @router.post(f"{ANTHROPIC_PATH}/count_tokens", responses=ANTHROPIC_ERRORS)
    async def count_tokens(request: Request, body: Annotated[CountTokensRequest, Body()]) -> dict[str, int]:
        """Tokens of a prompt."""
        return {"input_tokens": await _count(services, body, request)}

    @router.post("/v1/responses", responses=STREAM_RESPONSES)
    async def responses(request: Request, body: Annotated[ResponsesRequest, Body()]) -> Response:
        """OpenAI's Responses, which are not stored; streamed as server-sent events with `stream`."""
        made = _chunks(services, body, chat_of_response(body), request)
        if body.stream:
            return _stream(services, made, ResponseEvents(body))
        return WholeReply(lambda: _whole(services, made, lambda completion: response_of(body, completion)))

    return router


def in_dialect(path: str, error: HttpError) -> HttpError:
    """An error in the shape of the API that a path belongs to."""
    if path != ANTHROPIC_PATH and not path.startswith(f"{ANTHROPIC_PATH}/"):
        return error
    return AnthropicError(error.status, error.message, error.type, error.param, error.code, error.headers)


class _Reasoning(TypedDict):
    reasons: bool
    switch: str | None


def _reasoning(services: Services) -> _Reasoning:
    """Whether the model reasons, and what can switch that off."""
    switch = thinking_switch(services.tokenizer.template_variables)
    return {"reasons": services.reply_format.reasoning is not None, "switch": switch}


def _chunks(
    services: Services,
    body: RequestShape,
    asked: Translated,
    request: Request,
    planned: Callable[[ReplyPlan], None] = lambda reply: None,
) -> AsyncGenerator[Chunk, None]:
    chat = _chat(asked)

    async def plan(caller: HttpCaller) -> ReplyPlan:
        reply = await plan_chat(services, chat, caller)
        planned(reply)
        return replace(reply, ignored_fields=_ignored(body, asked, reply.ignored_fields))

    return with_own_names(planned_chunks(request, chat, plan), asked.names)


def _ignored(body: RequestShape, asked: Translated, of_chat: frozenset[str]) -> frozenset[str]:
    """All that changes nothing of a request, in its own names."""
    return asked.ignored | {*hints_of(body), *(request_path(name, asked.names) for name in of_chat)}


def _chat(asked: Translated) -> ChatRequest:
    """A translated request, checked as any other."""
    try:
        return ChatRequest.model_validate(asked.chat)
    except ValidationError as error:
        wrong = invalid_body([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])
        raise in_own_names(wrong, asked.names) from error


async def _whole(services: Services, made: AsyncGenerator[Chunk, None], translate: Callable[[Chunk], Chunk]) -> Chunk:
    return translate(await fold(made, FoldedChat, "chat.completion", services.config.max_answer_bytes))


def _stream(services: Services, made: AsyncGenerator[Chunk, None], events: DialectEvents) -> Response:
    async def sent() -> AsyncGenerator[bytes, None]:
        async with aclosing(made) as stream:
            async for chunk in stream:
                if named := events.feed(chunk):
                    yield _named(named)
        yield _named(events.finish())

    def failed(error: HttpError) -> bytes:
        plain = HttpError(error.status, error.message, error.type, error.param, error.code)
        return _named(events.fail(error.status, plain.body))

    return EventStream(sent(), reader_timeout_s=services.config.reader_timeout_s, terminator=b"", error_event=failed)


def _named(events: list[dict[str, Any]]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), event_json(event)) for event in events)


async def _anthropic(made: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """The same chunks; an error has Anthropic's shape."""
    try:
        async with aclosing(made) as stream:
            async for chunk in stream:
                yield chunk
    except FAILURES as error:
        raise in_dialect(ANTHROPIC_PATH, as_http(error)) from error


async def _count(services: Services, body: CountTokensRequest, request: Request) -> int:
    upstream = await services.coordinators.choose(request.scope["caller"])
    services.check_model(body.model, upstream.description)
    asked = prompt_of_messages(body, **_reasoning(services))
    chat = _chat(asked)
    try:
        tools = plan_tools(services.reply_format, chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        settings = template_settings(services, chat)
        prompt = await read_chat(services, chat.messages, tools, upstream.description.max_length, settings)
    except FAILURES as error:
        raise in_own_names(error, asked.names) from error
    ignore(request.scope, _ignored(body, asked, prompt.ignored_fields))
    return len(prompt.token_ids)
