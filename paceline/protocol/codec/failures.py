"""Errors inside a link."""

from __future__ import annotations

from paceline.protocol.codec.copying import MAX_NAME_BYTES, MAX_TEXT_BYTES, Part, bound, copier
from paceline.protocol.errors import Code, PacelineError, from_wire, require
from paceline.protocol.session import Failure
from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import types_pb2 as pb

LinkMessage = target_pb.TargetCommand | target_pb.TargetEvent | draft_pb.DraftCommand | draft_pb.DraftEvent

MAX_FACTS = 64
"""Most named facts of one failure; ours have at most ten."""


def _check_failure(message: pb.Failure) -> None:
    size = sum(len(name.encode()) + len(value.encode()) for name, value in message.metadata.items())
    require(size <= MAX_TEXT_BYTES, "failure metadata bytes", size, f"at most {MAX_TEXT_BYTES}")


bound(pb.Failure, "failure", reason=MAX_NAME_BYTES, message=MAX_TEXT_BYTES, metadata=MAX_FACTS)
# Session 0 is allowed here: it answers a message that named no session.
FAILURE = copier(
    Failure,
    pb.Failure,
    _check_failure,
    code=Part(decode=lambda code: code if code in Code.__members__.values() else int(Code.INTERNAL)),
    metadata=Part(dict, dict),
)


def failure_of(session_id: int, error: PacelineError, session_closed: bool = False) -> Failure:
    """The `Failure` that carries an exception to the other side of a link."""
    return Failure(
        session_id=session_id,
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        metadata=dict(error.metadata),
        retry_after_ms=error.retry_after_ms,
        retry_safe=error.retry_safe,
        session_closed=session_closed,
    )


def error_of(failure: Failure) -> PacelineError:
    """The exception that a `Failure` carries."""
    return from_wire(
        failure.reason, failure.message, metadata=failure.metadata, retry_after_ms=failure.retry_after_ms
    )


def session_id_of(message: LinkMessage) -> int:
    """The session of a message that may be malformed in every other way; 0 if it names none."""
    oneof = message.DESCRIPTOR.oneofs[0].name
    kind = message.WhichOneof(oneof)
    return 0 if kind is None else int(getattr(message, kind).session_id)
