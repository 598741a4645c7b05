"""Who may call what: the role in a caller's certificate against the roles that a method takes.

Asked on a server that demands client certificates (`server.tls_client_ca`), unless `server.tls_roles` is off.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from paceline.protocol.errors import PermissionDenied
from paceline.rpc.statuses import abort_with
from paceline.runtime.roles import Role, role_in

logger = logging.getLogger(__name__)

_COORDINATOR = frozenset({Role.COORDINATOR})
_STATUS = _COORDINATOR | {Role.OPERATOR}
_REQUESTS = frozenset({Role.CLIENT, Role.OPERATOR})
_ANYBODY = frozenset(Role)

CALLERS: Mapping[str, frozenset[Role]] = {
    "/paceline.v1.TargetService/Verify": _COORDINATOR,
    "/paceline.v1.TargetService/GetTargetStatus": _STATUS,
    "/paceline.v1.DraftService/Draft": _COORDINATOR,
    "/paceline.v1.DraftService/GetDraftStatus": _STATUS,
    "/paceline.v1.GenerationService/Generate": _REQUESTS,
    "/paceline.v1.GenerationService/DescribeModels": _REQUESTS,
    # Whoever has a role may ask whether a peer lives; probes without a certificate have `health_port`.
    "/grpc.health.v1.Health/Check": _ANYBODY,
    "/grpc.health.v1.Health/List": _ANYBODY,
    "/grpc.health.v1.Health/Watch": _ANYBODY,
}
"""Every other method, reflection for example, is an operator's alone."""
_OTHERS = frozenset({Role.OPERATOR})


def check_caller(method: str, peer: str, identity: Mapping[str, Any]) -> None:
    """Refuse a call that the caller's role does not allow.

    Args:
        method: full name, as `/package.Service/Method`.
        peer: the caller's address.
        identity: `auth_context()` of the call.

    Raises:
        PermissionDenied: naming the role, those that the method takes, and the URI that is wanted.
    """
    uris = [uri.decode("utf-8", "replace") for uri in identity.get("peer_uri", ())]
    role, allowed = role_in(uris), CALLERS.get(method, _OTHERS)
    if role in allowed:
        return
    wanted = " or ".join(each.uri() for each in sorted(allowed))
    found = role or f"none (its URIs: {', '.join(uris) or 'none'})"
    raise PermissionDenied(
        f"role of {peer} = {found}: must be {' or '.join(sorted(allowed))} for {method}; "
        f"the certificate needs {wanted} among its subject alternative names, and no other role",
        metadata={"field": "role", "value": role or "", "limit": ",".join(sorted(allowed)), "method": method},
    )


class ChecksRoles(grpc.aio.ServerInterceptor):
    """Refuses calls that the caller's role does not allow, before anything of them is read."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The call's handler, behind the check."""
        handler = await continuation(details)
        if handler is None:
            return None
        reads = "stream" if handler.request_streaming else "unary"
        writes = "stream" if handler.response_streaming else "unary"
        kind = f"{reads}_{writes}"
        return handler._replace(**{kind: _checked(getattr(handler, kind), details.method)})


def _checked(method: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], Any]:
    async def check(context: Any) -> None:
        try:
            check_caller(name, context.peer(), context.auth_context())
        except PermissionDenied as error:
            logger.warning("call refused: method=%s reason=%s error=%s", name, error.reason, error.message)
            await abort_with(context, error)

    async def called(request: Any, context: Any) -> Any:
        await check(context)
        return await method(request, context)

    async def streamed(request: Any, context: Any) -> Any:
        await check(context)
        async for response in method(request, context):
            yield response

    # gRPC asks a handler's function whether it is a generator.
    return streamed if inspect.isasyncgenfunction(method) else called
