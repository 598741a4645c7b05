"""Typed errors as gRPC statuses: `google.rpc.Status` with `ErrorInfo`, and `RetryInfo` when overloaded.

A status without our `ErrorInfo` was made by gRPC itself (a dead peer, a
deadline, a cancelled call); `from_rpc_error` maps those by code.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from paceline.protocol.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    PermissionDenied,
    Unauthenticated,
    Unsupported,
    UntrustedPeer,
    from_wire,
)

logger = logging.getLogger(__name__)

DOMAIN = "paceline"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARACTERS = 1024
NO_MEMORY_MS = 200
"""When to ask a process again that had no memory: what others of its requests hold goes as they end."""
"""Statuses travel in HTTP/2 headers, which gRPC bounds at 8 KiB."""

Context = Any  # grpc.aio.ServicerContext of any request and response
Answer = TypeVar("Answer")
_DISTRUST = {
    "Hostname Verification Check failed": "its certificate lacks the DNS name that is expected of it: the host's, "
    "or between services its role's, as target.paceline",
    "CERTIFICATE_VERIFY_FAILED: certificate has expired": "its certificate has expired",
    "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid": "its certificate is not valid yet",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of no authority in this side's tls_ca",
    "WRONG_VERSION_NUMBER": "it does not speak TLS, and this side's tls_ca is set",
}
"""What gRPC says where a handshake has failed, and what it means."""
_HUNG_UP = (
    "it hung up while connecting; its log may say that it demands TLS, or a certificate of its tls_client_ca "
    "that has not expired"
)
_BROKEN = ("RST_STREAM", "Stream removed", "Internal error from Core")
"""What gRPC says, under codes that mean a defect, where a stream has ended: reset by the peer, damaged, or over
before what was written had left."""
_CANCELLED_HERE = ("Locally cancelled", "Channel closed", "Stream removed (Channel closed")
"""How gRPC begins what it says of a call that this side has cancelled, or whose channel it has closed."""
_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


def to_status(error: PacelineError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error."""
    facts = {key: value[:MAX_MESSAGE_CHARACTERS] for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts)
    status = status_pb2.Status(code=int(error.code), message=error.message[:MAX_MESSAGE_CHARACTERS])
    status.details.add().Pack(info)
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    return status


def from_status(status: status_pb2.Status) -> PacelineError | None:
    """The error that a status carries; None if it isn't one of ours."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    reason, retry_after_ms = "", None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason = info.reason
        elif detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    if not reason:
        return None
    return from_wire(reason, status.message, metadata=dict(info.metadata), retry_after_ms=retry_after_ms)


def from_rpc_error(error: grpc.RpcError, peer: str = "") -> PacelineError:
    """The typed error of a failed call, sync or async; `peer` names the other side in the message."""
    if (typed := _sent_with(error)) is not None:
        return typed
    kind = _kind_of(error.code(), error.details() or "")
    details = error.details() or error.code().name
    meaning = _meaning_of(details)
    told = f"{meaning} ({details})" if meaning else details
    message = f"{peer}: {told}" if peer else told
    return kind(message, metadata={"peer": peer} if peer else None)


def is_of_the_call() -> bool:
    """Whether a `CancelledError` that was just caught is that of a call, and nobody has cancelled the task.

    gRPC tells so whoever waits for a call that it has cancelled itself, as it does when its channel is closed.
    """
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


async def abort_with(context: Context, error: PacelineError) -> NoReturn:
    """End a call with the error's status. Always raises (gRPC's own `AbortError`)."""
    status = to_status(error)
    await context.abort(
        _GRPC_CODES[status.code],
        status.message,
        trailing_metadata=((DETAILS_KEY, status.SerializeToString()),),
    )
    raise AssertionError("abort returned")


def typed_errors(
    method: Callable[[Any, Any, Context], Awaitable[Answer]],
) -> Callable[[Any, Any, Context], Awaitable[Answer]]:
    """Decorate an async servicer method: its `PacelineError` becomes the call's status.

    Anything else that it raises is a defect: logged with its stack and sent as
    `InternalError`; want of memory is `Overloaded`. Cancellation passes through.
    """

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: Context) -> Answer:
        try:
            return await method(self, request, context)
        except PacelineError as error:
            await abort_with(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            logger.exception("call failed: method=%s peer=%s", method.__qualname__, context.peer())
            await abort_with(context, unexpected(error))

    return wrapper


def unexpected(error: Exception) -> PacelineError:
    """What a peer may know of a defect: its kind; the log has the rest. A process without memory has no room now."""
    if isinstance(error, MemoryError):
        return Overloaded("no memory is left; the service's log has the stack", retry_after_ms=NO_MEMORY_MS)
    return InternalError(f"unexpected {type(error).__name__}; the service's log has the stack")


def _sent_with(error: grpc.RpcError) -> PacelineError | None:
    """The error that came with a failed call; None: none of ours, or details that nobody can read."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key != DETAILS_KEY:
            continue
        try:
            typed = from_status(status_pb2.Status.FromString(value))
        except DecodeError as malformed:
            logger.warning("malformed details of a status: code=%s error=%s", error.code(), malformed)
            continue
        if typed is not None:
            return typed
    return None


def _meaning_of(details: str) -> str:
    """What a failed connection means to whoever set it up; empty: gRPC's details say it."""
    distrust = next((meaning for said, meaning in _DISTRUST.items() if said in details), "")
    hung_up = details.startswith("failed to connect") and details.endswith("Socket closed")
    return distrust or (_HUNG_UP if hung_up else "")


def _kind_of(code: grpc.StatusCode, details: str) -> type[PacelineError]:
    """The error for a status that gRPC made itself."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidInput if "larger than max" in details else Overloaded
    if code is grpc.StatusCode.CANCELLED:
        # A peer that is stopped at once cancels its calls: for the caller it is gone.
        return Cancelled if details.startswith(_CANCELLED_HERE) else PeerUnavailable
    if code is grpc.StatusCode.UNAVAILABLE and any(said in details for said in _DISTRUST):
        return UntrustedPeer
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return PeerUnavailable if any(said in details for said in _BROKEN) else InternalError
    return {
        grpc.StatusCode.UNAVAILABLE: PeerUnavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.UNIMPLEMENTED: Unsupported,
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    }.get(code, InternalError)


assert all(int(code) in _GRPC_CODES for code in Code)
