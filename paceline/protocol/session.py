"""What sessions on the target and on the draft service have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.protocol.errors import require
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams

MAX_TIME_LEFT_MS = (1 << 32) - 1
"""Longest `time_left_ms` of a session: 49.7 days, the most that the wire's field holds."""

MAX_TENANT_BYTES = 64
"""Most bytes that a keyed BLAKE2b takes as its key."""


@dataclass(frozen=True)
class SessionSpec:
    """What the sessions of one request have in common on both services: what they continue, and how.

    The first `prompt_length` of `token_ids` are the prompt, the others output. `max_length` counts the tokens
    that prompt and output may become; 0: the service's context length. `end_token_ids` end the text. Sessions share
    prefixes within a `tenant` only.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    noise: NoiseKey
    acceptance: Acceptance
    time_left_ms: int | None = None
    traceparent: str = ""
    max_length: int = 0
    end_token_ids: tuple[int, ...] = ()
    tenant: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", self.sampling.with_defaults())
        prefix = len(self.token_ids)
        require(prefix >= 1, "prefix length", prefix, "at least 1 token")
        require(1 <= self.prompt_length <= prefix, "prompt_length", self.prompt_length, f"in [1, {prefix}]")
        long_enough = self.max_length == 0 or self.max_length >= prefix
        require(long_enough, "max_length", self.max_length, f"at least the prefix's {prefix} tokens, or 0")
        size = len(self.tenant.encode())
        require(size <= MAX_TENANT_BYTES, "tenant bytes", size, f"at most {MAX_TENANT_BYTES}")


@dataclass(frozen=True)
class Close:
    """Ends a session; harmless if it is unknown."""

    session_id: int


@dataclass(frozen=True)
class Failure:
    """One session's error inside a link; the link's other sessions go on."""

    session_id: int
    code: int
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_ms: int | None = None
    retry_safe: bool = False
    session_closed: bool = False
