"""Routes for operators: whether the gateway serves, its load and metrics, and the cluster behind it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from paceline.protocol.errors import PacelineError, PeerUnavailable, Unauthenticated
from paceline.protocol.generation import ModelDescription, PeerDescription
from paceline.runtime import metrics
from paceline_gateway.http.guard import RunningRequests
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import Coordinator
from paceline_gateway.upstream.services import Services


def operating_routes(services: Services, running_requests: RunningRequests) -> APIRouter:
    """Build the routes over services."""
    router = APIRouter()

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """200 if a request would find a target; 503 otherwise, and while the gateway drains."""
        if running_requests.is_draining:
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
        """The number of requests that run now."""
        return {"server_load": running_requests.count}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """All metrics, for Prometheus."""
        content, content_type = metrics.exposition()
        return Response(content, media_type=content_type)

    @router.get("/cluster")
    async def cluster(request: Request) -> dict[str, Any]:
        """What each coordinator says of itself and of its peers, for callers with a key alone, as with models."""
        return await cluster_view(services, request.scope["caller"])

    return router


async def cluster_view(services: Services, caller: HttpCaller) -> dict[str, Any]:
    """Describe all coordinators, also those that don't answer.

    Raises:
        Unauthenticated: they refuse the caller's key.
    """
    views = (_coordinator(coordinator, caller, services) for coordinator in services.coordinators.members)
    return {"coordinators": await asyncio.gather(*views)}


async def _coordinator(coordinator: Coordinator, caller: HttpCaller, services: Services) -> dict[str, Any]:
    """Describe one coordinator; any failure but `Unauthenticated` becomes part of the description."""
    view = {"address": coordinator.address, "requests": coordinator.request_count}
    try:
        description = await coordinator.describe(caller)
    except Unauthenticated:
        raise
    except PacelineError as error:
        return view | {"reachable": False, "problem": error.message, "models": []}
    model = _model(description, services.served_name(description))
    return view | {"reachable": True, "problem": "", "models": [model]}


def _model(description: ModelDescription, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "max_length": description.max_length,
        "drafters": list(description.drafters),
        "peers": [_peer(peer) for peer in description.peers],
    }


def _peer(peer: PeerDescription) -> dict[str, Any]:
    """Describe one peer: `sessions` are this coordinator's; its latest step and its queue are all coordinators'."""
    return {
        "role": peer.kind.value,
        "address": peer.address,
        "up": peer.up,
        "problem": peer.problem,
        "model": peer.fingerprint.model,
        "sessions": peer.sessions,
        "step_sessions": peer.step_sessions,
        "step_rows": peer.step_rows,
        "queue": peer.queue,
        "step_ms": peer.step_ms,
        "group": None if peer.group is None else asdict(peer.group),
    }
