"""Every error that crosses a process boundary.

An exception knows its `google.rpc.Code`, its stable upper-snake reason, and
whether sending the same request again can do no harm. `paceline.rpc` turns it
into a gRPC status with `ErrorInfo` (and `RetryInfo`), `paceline.protocol.codec` into a
`Failure` inside a link; both rebuild the same exception on the other side with
`from_wire`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import ClassVar

_NUMBER = re.compile(r"[-+.\d]{1,32}(e[-+]?\d+)?|inf|nan|None|True|False")


class Code(IntEnum):
    """The numbers of `google.rpc.Code` that Paceline uses."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class PacelineError(Exception):
    """Base of all typed errors. A subclass that names a `reason` of its own crosses process boundaries as itself.

    Attributes:
        metadata: the named facts of the message (field, value, limit, peer …).
        retry_after_ms: set when the peer is overloaded.
    """

    code: ClassVar[Code] = Code.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    retry_safe: ClassVar[bool] = False
    by_reason: ClassVar[dict[str, type[PacelineError]]] = {}

    def __init_subclass__(cls, *, code: Code | None = None, reason: str = "", retry_safe: bool = False) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.code, cls.reason, cls.retry_safe = code, reason, retry_safe
            cls.by_reason[reason] = cls

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_ms = retry_after_ms

    @property
    def for_log(self) -> str:
        """The message without a client's text, which may stand in the refused value: for logs and spans.

        Numbers are shown. Of any other value only the field is named.
        """
        refused_text = self.metadata.get("value", "0")
        if _NUMBER.fullmatch(refused_text):
            return self.message
        return f"{self.metadata.get('field', 'a value')} was refused (the client has the message)"


class InternalError(PacelineError):
    """A defect of ours; the message names the session and the log has the stack."""


class InvalidInput(PacelineError, code=Code.INVALID_ARGUMENT, reason="INVALID_INPUT"):
    """A value outside its limits. `InvalidInput.of` names field, value and limit."""

    @classmethod
    def of(cls, field: str, value: object, limit: str) -> InvalidInput:
        """Build the error for one field: `limit` reads after "must be"."""
        short_text = _shorten(repr(value))
        return cls(
            f"{field} = {short_text}: must be {limit}",
            metadata={"field": field, "value": short_text, "limit": limit},
        )


class DamagedFile(InvalidInput):
    """A model's file that holds something else than its format says; crosses a wire as `InvalidInput`."""

    @classmethod
    def at(cls, file: Path, reason: str) -> DamagedFile:
        """Build the error for one file; `reason` is what the library that reads it says."""
        return cls(
            f"file {str(file)!r}: damaged or truncated ({reason}); fetch it again",
            metadata={"field": "file", "value": str(file), "limit": "neither damaged nor truncated"},
        )


class PrefixMismatch(PacelineError, code=Code.FAILED_PRECONDITION, reason="PREFIX_MISMATCH", retry_safe=True):
    """A round or commit that doesn't continue what the service holds."""


class VocabularyMismatch(PacelineError, code=Code.FAILED_PRECONDITION, reason="VOCABULARY_MISMATCH"):
    """Two services whose tokenizers differ."""


class ProtocolMismatch(PacelineError, code=Code.FAILED_PRECONDITION, reason="PROTOCOL_MISMATCH"):
    """A peer that speaks another protocol version, or breaks the order of a link."""


class Unsupported(PacelineError, code=Code.UNIMPLEMENTED, reason="UNSUPPORTED"):
    """A feature that can't be served exactly, refused by name."""

    @classmethod
    def of(cls, field: str, reason: str) -> Unsupported:
        """Build the error for one field of a request."""
        return cls(f"{field}: {reason}", metadata={"field": field})


class UnknownSession(PacelineError, code=Code.NOT_FOUND, reason="UNKNOWN_SESSION", retry_safe=True):
    """A message for a session that isn't open on the link."""


class UnknownModel(PacelineError, code=Code.NOT_FOUND, reason="UNKNOWN_MODEL"):
    """A request for a model that isn't served."""


class Overloaded(PacelineError, code=Code.RESOURCE_EXHAUSTED, reason="OVERLOADED", retry_safe=True):
    """No room now; `retry_after_ms` says when to try again."""

    @property
    def is_of_the_key(self) -> bool:
        """Whether a limit of the caller's own key is reached: room elsewhere is not room for it."""
        return "limit" in self.metadata


class PeerUnavailable(PacelineError, code=Code.UNAVAILABLE, reason="PEER_UNAVAILABLE", retry_safe=True):
    """A peer that is dead, unreachable or silent; the message names it."""


class Unauthenticated(PacelineError, code=Code.UNAUTHENTICATED, reason="UNAUTHENTICATED"):
    """A request without a valid API key, or one whose key was revoked while it ran."""


class UntrustedPeer(PacelineError, code=Code.UNAVAILABLE, reason="UNTRUSTED_PEER"):
    """A peer that TLS refuses, or that refuses TLS: trying again mends nothing, other settings or files do."""


class PermissionDenied(PacelineError, code=Code.PERMISSION_DENIED, reason="PERMISSION_DENIED"):
    """A caller whose role doesn't allow the call; the message names it and the roles that do."""


class DeadlineExceeded(PacelineError, code=Code.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED"):
    """The request's time ran out."""


class Cancelled(PacelineError, code=Code.CANCELLED, reason="CANCELLED"):
    """The client cancelled, or left its text unread for too long."""


def from_wire(
    reason: str,
    message: str,
    *,
    metadata: Mapping[str, str] | None = None,
    retry_after_ms: int | None = None,
) -> PacelineError:
    """Rebuild the exception that a peer sent; unknown reasons become `InternalError`."""
    error = PacelineError.by_reason.get(reason, InternalError)
    return error(message, metadata=metadata, retry_after_ms=retry_after_ms)


def fresh(error: PacelineError) -> PacelineError:
    """A copy to raise: one exception raised many times would gather tracebacks."""
    return from_wire(error.reason, error.message, metadata=error.metadata, retry_after_ms=error.retry_after_ms)


def require(condition: bool, name: str, value: object, limit: str) -> None:
    """Raise `InvalidInput` naming field, value and limit unless the condition holds."""
    if not condition:
        raise InvalidInput.of(name, value, limit)


def require_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise `InvalidInput` naming the first token id outside the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidInput.of(name, token_id, f"in [0, {vocab_size}), the vocabulary")


def _shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
