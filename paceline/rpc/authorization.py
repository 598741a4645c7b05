"""Authorization of calls: the role in a caller's certificate against the roles that a method accepts.

Checked on servers that demand client certificates (`server.tls_client_ca`), unless `server.tls_roles` is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from paceline.protocol.errors import PacelineError, PermissionDenied
from paceline.rpc.statuses import abort_with
from paceline.runtime.roles import PeerRole, role_in

logger = logging.getLogger(__name__)

_COORDINATOR = frozenset({PeerRole.COORDINATOR})
_STATUS = _COORDINATOR | {PeerRole.OPERATOR}
_REQUESTS = frozenset({PeerRole.CLIENT, PeerRole.OPERATOR})
_ANYBODY = frozenset(PeerRole)

CALLERS: Mapping[str, frozenset[PeerRole]] = {
    "/paceline.v1.TargetService/Verify": _COORDINATOR,
    "/paceline.v1.TargetService/GetTargetStatus": _STATUS,
    "/paceline.v1.DraftService/Draft": _COORDINATOR,
    "/paceline.v1.DraftService/GetDraftStatus": _STATUS,
    "/paceline.v1.GenerationService/Generate": _REQUESTS,
    "/paceline.v1.GenerationService/DescribeModels": _REQUESTS,
    # Every role may check a peer's health; probes without a certificate have `health_port`.
    "/grpc.health.v1.Health/Check": _ANYBODY,
    "/grpc.health.v1.Health/List": _ANYBODY,
    "/grpc.health.v1.Health/Watch": _ANYBODY,
}
_OTHERS = frozenset({PeerRole.OPERATOR})
"""Roles of every other method, reflection for example."""
FIRST_MESSAGE_S = 5.0


def check_caller(method: str, peer: str, identity: Mapping[str, Any]) -> None:
    """Refuse a call that the caller's role doesn't allow.

    Args:
        method: full name, as `/package.Service/Method`.
        peer: the caller's address.
        identity: `auth_context()` of the call.

    Raises:
        PermissionDenied: naming the role, the accepted roles, and the URI that the certificate needs.
    """
    uris = [uri.decode("utf-8", "replace") for uri in identity.get("peer_uri", ())]
    role, roles = role_in(uris), CALLERS.get(method, _OTHERS)
    if role in roles:
        return
    role_uris = " or ".join(each.uri() for each in sorted(roles))
    role_text = role or f"none (its URIs: {', '.join(uris) or 'none'})"
    raise PermissionDenied(
        f"role of {peer} = {role_text}: must be {' or '.join(sorted(roles))} for {method}; "
        f"the certificate needs {role_uris} among its subject alternative names, and no other role",
        metadata={"field": "role", "value": role or "", "limit": ",".join(sorted(roles)), "method": method},
    )


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that the caller's role doesn't allow, before anything of them is read."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The call's handler with the check in front."""
        handler = await continuation(details)
        if handler is None:
            return None
        reads = "stream" if handler.request_streaming else "unary"
        writes = "stream" if handler.response_streaming else "unary"
        kind = f"{reads}_{writes}"
        guard = _guard(getattr(handler, kind), details.method, streams=handler.request_streaming)
        return handler._replace(**{kind: guard})


def _guard(method: Callable[[Any, Any], Any], name: str, *, streams: bool) -> Callable[[Any, Any], Any]:
    async def check(context: Any) -> None:
        try:
            check_caller(name, context.peer(), context.auth_context())
        except PermissionDenied as error:
            logger.warning("call refused: method=%s reason=%s error=%s", name, error.reason, error.message)
            if streams:
                await _take_first(context)
            await abort_with(context, error)

    async def call(request: Any, context: Any) -> Any:
        await check(context)
        return await method(request, context)

    async def stream(request: Any, context: Any) -> Any:
        await check(context)
        async for response in method(request, context):
            yield response

    # gRPC checks whether a handler's function is a generator.
    return stream if inspect.isasyncgenfunction(method) else call


async def _take_first(context: Any) -> None:
    """Let the caller's first message arrive. A write that a refusal overtakes fails as INTERNAL and hides it."""
    with contextlib.suppress(TimeoutError, PacelineError):
        async with asyncio.timeout(FIRST_MESSAGE_S):
            await context.read()
