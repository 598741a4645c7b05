"""OpenAI's routes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from starlette.responses import Response

from gateway.caller import HttpCaller
from gateway.chat import plan_chat
from gateway.completions import plan_completion
from gateway.folding import FoldedChat, FoldedCompletion, whole
from gateway.openai_types import ChatRequest, CompletionRequest
from gateway.replies import Chunk, PlannedReply, chunks
from gateway.responses import STREAMED, EventStream, WholeReply, data_event
from gateway.services import Services
from paceline.protocol.generation import ModelDescription


def openai_routes(services: Services) -> APIRouter:
    """The routes over services."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(request: Request, body: Annotated[ChatRequest, Body()]) -> Response:
        """OpenAI's Chat Completions; streamed as server-sent events with `stream`."""
        caller = request.scope["caller"]
        made = planned_chunks(lambda: plan_chat(services, body, caller), caller)
        if body.stream:
            return _stream(services, made)
        return WholeReply(lambda: whole(made, FoldedChat, "chat.completion"))

    @router.post("/v1/completions", responses=STREAMED)
    async def completions(request: Request, body: Annotated[CompletionRequest, Body()]) -> Response:
        """OpenAI's Completions; streamed as server-sent events with `stream`."""
        caller = request.scope["caller"]
        made = planned_chunks(lambda: plan_completion(services, body, caller), caller)
        if body.stream:
            return _stream(services, made)
        return WholeReply(lambda: whole(made, FoldedCompletion, "text_completion"))

    @router.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """What is served: one model."""
        described = await services.coordinators.models(request.scope["caller"])
        return {"object": "list", "data": [_model(services, described)]}

    @router.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> dict[str, Any]:
        """One model by its name."""
        described = await services.coordinators.models(request.scope["caller"])
        services.check_model(model, described)
        return _model(services, described)

    return router


async def planned_chunks(
    plan: Callable[[], Awaitable[PlannedReply]], caller: HttpCaller
) -> AsyncGenerator[Chunk, None]:
    """A reply's chunks, its request read first. Raises as both."""
    async with aclosing(chunks(await plan(), caller)) as made:
        async for chunk in made:
            yield chunk


def _stream(services: Services, made: AsyncGenerator[Chunk, None]) -> Response:
    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(made) as stream:
            async for chunk in stream:
                yield data_event(chunk)

    return EventStream(events(), reader_timeout_s=services.config.reader_timeout_s)


def _model(services: Services, described: ModelDescription) -> dict[str, Any]:
    name = services.served_name(described)
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "paceline",
        "root": described.target.model or name,
        "max_model_len": described.max_length,
        "drafters": list(described.drafters),
        "default_sampling_params": described.defaults,
    }
