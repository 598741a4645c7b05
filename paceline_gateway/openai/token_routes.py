"""vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request

from paceline.models.prompts import PIECE_BYTES
from paceline.protocol.errors import require
from paceline_gateway.http.bodies import JsonRoute
from paceline_gateway.http.errors import refusal
from paceline_gateway.http.ignored_fields import hints_of, ignore
from paceline_gateway.openai.chat_prompt import read_chat
from paceline_gateway.openai.logprobs import token_text
from paceline_gateway.openai.template_fields import template_settings
from paceline_gateway.openai.tools import ToolPlan
from paceline_gateway.openai.types import DetokenizeRequest, TokenizeRequest
from paceline_gateway.upstream.services import Services


def token_routes(services: Services) -> APIRouter:
    """Build the routes over services."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(request: Request, body: Annotated[TokenizeRequest, Body()]) -> dict[str, Any]:
        """The ids of a prompt or a chat."""
        return await _tokenization(services, body, request)

    @router.post("/detokenize")
    async def detokenize(request: Request, body: Annotated[DetokenizeRequest, Body()]) -> dict[str, Any]:
        """The text of ids."""
        upstream = await services.coordinators.choose(request.scope["caller"])
        services.check_model(body.model, upstream.description)
        limit = upstream.description.max_length
        require(len(body.tokens) <= limit, "tokens", len(body.tokens), f"at most {limit}, the context length")
        return {"prompt": await services.text(body.tokens, "tokens")}

    return router


async def _tokenization(services: Services, body: TokenizeRequest, request: Request) -> dict[str, Any]:
    upstream = await services.coordinators.choose(request.scope["caller"])
    services.check_model(body.model, upstream.description)
    max_length = upstream.description.max_length
    if (body.prompt is None) == (body.messages is None):
        raise refusal("prompt", "exactly 1 of prompt and messages must be given")
    if body.messages is not None:
        settings = template_settings(services, body)
        prompt = await read_chat(services, body.messages, ToolPlan(), max_length, settings)
        ids = prompt.token_ids
        ignore(request.scope, {*hints_of(body), *prompt.ignored_fields})
    else:
        special = body.add_special_tokens is not False
        ids = await services.token_ids(body.prompt or "", max_length, add_special_tokens=special)
    strings = await _token_texts(services, ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": max_length, "tokens": list(ids), "token_strs": strings}


async def _token_texts(services: Services, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each id by itself; many ids are read beside the event loop."""

    def read() -> list[str]:
        return [token_text(token_id, services.tokenizer) for token_id in token_ids]

    return await services.prompts.run(read, PIECE_BYTES * len(token_ids))
