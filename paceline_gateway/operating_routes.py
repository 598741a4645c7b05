"""Routes for who operates the gateway."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from paceline.protocol.errors import PeerUnavailable
from paceline.runtime import metrics
from paceline_gateway.middleware import RunningRequests
from paceline_gateway.services import Services


def operating_routes(services: Services, running: RunningRequests) -> APIRouter:
    """The routes over services."""
    router = APIRouter()

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """200 if a request would find a target; 503 otherwise, and while the gateway drains."""
        if running.draining:
            raise PeerUnavailable("the gateway is draining")
        await services.coordinators.check()
        return Response()

    @router.get("/ping", response_class=Response)
    async def ping() -> Response:
        """200: the gateway itself answers."""
        return Response()

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Paceline's version."""
        return {"version": metadata.version("paceline")}

    @router.get("/load")
    async def load() -> dict[str, Any]:
        """Requests that run now."""
        return {"server_load": running.count}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """What Prometheus reads."""
        content, content_type = metrics.exposition()
        return Response(content, media_type=content_type)

    return router
