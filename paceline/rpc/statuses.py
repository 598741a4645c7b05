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
"""Statuses travel in HTTP/2 headers, which gRPC limits to 8 KiB."""
NO_MEMORY_MS = 200
"""Hint to retry when a process has no memory: other requests free theirs as they end."""

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
"""gRPC's messages of failed handshakes, and their meaning."""
_HANG_UP = (
    "it hung up while connecting; its log may say that it demands TLS, or a certificate of its tls_client_ca "
    "that has not expired"
)
_STREAM_ENDS = ("RST_STREAM", "Stream removed", "Internal error from Core")
"""gRPC's messages of ended streams that have the code of a defect: reset by the peer, damaged, or ended before a
write was sent."""
_LOCAL_CANCELS = ("Locally cancelled", "Channel closed", "Stream removed (Channel closed")
"""Beginnings of gRPC's messages of calls that this side has cancelled, or whose channel it has closed."""
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
    if (own_error := _own_error(error)) is not None:
        return own_error
    kind = _kind_of(error.code(), error.details() or "")
    details = error.details() or error.code().name
    meaning = _meaning_of(details)
    text = f"{meaning} ({details})" if meaning else details
    message = f"{peer}: {text}" if peer else text
    return kind(message, metadata={"peer": peer} if peer else None)


def is_of_the_call() -> bool:
    """Whether a `CancelledError` that was just caught comes from a call, and not from a cancelled task.

    gRPC raises it in tasks that wait for a call which gRPC has cancelled, for example because the channel was closed.
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

    Any other exception is a defect, logged with its stack and sent as
    `InternalError`; a `MemoryError` is `Overloaded`. Cancellation passes through.
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
            await abort_with(context, unexpected_error(error))

    return wrapper


def unexpected_error(error: Exception) -> PacelineError:
    """The error that a peer gets for a defect: its type; the log has the rest. Without memory it is `Overloaded`."""
    if isinstance(error, MemoryError):
        return Overloaded("no memory is left; the service's log has the stack", retry_after_ms=NO_MEMORY_MS)
    return InternalError(f"unexpected {type(error).__name__}; the service's log has the stack")


def _own_error(error: grpc.RpcError) -> PacelineError | None:
    """Our error in a failed call's metadata; None: there is none, or its details are malformed."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key != DETAILS_KEY:
            continue
        try:
            own_error = from_status(status_pb2.Status.FromString(value))
        except DecodeError as decode_error:
            logger.warning("malformed details of a status: code=%s error=%s", error.code(), decode_error)
            continue
        if own_error is not None:
            return own_error
    return None


def _meaning_of(details: str) -> str:
    """The meaning of a failed connection; empty: gRPC's details are clear enough."""
    distrust = next((meaning for phrase, meaning in _DISTRUST.items() if phrase in details), "")
    is_hang_up = details.startswith("failed to connect") and details.endswith("Socket closed")
    return distrust or (_HANG_UP if is_hang_up else "")


def _kind_of(code: grpc.StatusCode, details: str) -> type[PacelineError]:
    """The error type of a status that gRPC made itself."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidInput if "larger than max" in details else Overloaded
    if code is grpc.StatusCode.CANCELLED:
        # A peer that stops at once cancels its calls: for the caller it is gone.
        return Cancelled if details.startswith(_LOCAL_CANCELS) else PeerUnavailable
    if code is grpc.StatusCode.UNAVAILABLE and any(phrase in details for phrase in _DISTRUST):
        return UntrustedPeer
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return PeerUnavailable if any(phrase in details for phrase in _STREAM_ENDS) else InternalError
    return {
        grpc.StatusCode.UNAVAILABLE: PeerUnavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.UNIMPLEMENTED: Unsupported,
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    }.get(code, InternalError)


assert all(int(code) in _GRPC_CODES for code in Code)
