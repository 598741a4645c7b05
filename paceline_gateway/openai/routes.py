"""OpenAI's routes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from starlette.responses import Response

from paceline.protocol.generation import ModelDescription
from paceline_gateway.http.answers import STREAM_RESPONSES, EventStream, WholeReply, data_event
from paceline_gateway.http.bodies import JsonRoute
from paceline_gateway.openai.chat import plan_chat
from paceline_gateway.openai.chunks import planned_chunks
from paceline_gateway.openai.completions import plan_completion
from paceline_gateway.openai.folding import FoldedChat, FoldedCompletion, fold
from paceline_gateway.openai.types import ChatRequest, Chunk, CompletionRequest
from paceline_gateway.upstream.services import Services


def openai_routes(services: Services) -> APIRouter:
    """Build the routes over services."""
    router = APIRouter(route_class=JsonRoute)
    max_bytes = services.config.max_answer_bytes

    @router.post("/v1/chat/completions", responses=STREAM_RESPONSES)
    async def chat_completions(request: Request, body: Annotated[ChatRequest, Body()]) -> Response:
        """OpenAI's Chat Completions; streamed as server-sent events with `stream`."""
        chunks = planned_chunks(request, body, lambda caller: plan_chat(services, body, caller))
        if body.stream:
            return _stream(services, chunks)
        return WholeReply(lambda: fold(chunks, FoldedChat, "chat.completion", max_bytes))

    @router.post("/v1/completions", responses=STREAM_RESPONSES)
    async def completions(request: Request, body: Annotated[CompletionRequest, Body()]) -> Response:
        """OpenAI's Completions; streamed as server-sent events with `stream`."""
        chunks = planned_chunks(request, body, lambda caller: plan_completion(services, body, caller))
        if body.stream:
            return _stream(services, chunks)
        return WholeReply(lambda: fold(chunks, FoldedCompletion, "text_completion", max_bytes))

    @router.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """What is served: one model."""
        description = await services.coordinators.describe_models(request.scope["caller"])
        return {"object": "list", "data": [_model(services, description)]}

    @router.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> dict[str, Any]:
        """One model by its name."""
        description = await services.coordinators.describe_models(request.scope["caller"])
        services.check_model(model, description)
        return _model(services, description)

    return router


def _stream(services: Services, chunks: AsyncGenerator[Chunk, None]) -> Response:
    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield data_event(chunk)

    return EventStream(events(), reader_timeout_s=services.config.reader_timeout_s)


def _model(services: Services, description: ModelDescription) -> dict[str, Any]:
    name = services.served_name(description)
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "paceline",
        "root": description.target.model or name,
        "max_model_len": description.max_length,
        "drafters": list(description.drafters),
        "default_sampling_params": description.defaults,
    }
