"""The first messages of a link, and the status of a service."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.errors import require
from paceline.protocol.features import NO_FEATURES, FeatureNeed, FeatureOffer
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
MAX_FRAME_MESSAGES = 1024
"""Most commands or events in one frame. All of a frame are handled in one go, and the smallest take a few bytes each:
the bytes alone would let 170,000 of them hold the reader's event loop for a second."""

MAX_DRAFTERS = 16
"""Most drafters of one service. Requests look through them, and each has a line of costs."""


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a model to its peers; an empty tokenizer fits any vocabulary."""

    model: str = ""
    tokenizer: str = ""
    vocab_size: int = 0
    numeric: str = ""


@dataclass(frozen=True)
class Hello:
    """First message of a link, from the coordinator."""

    incarnation: str
    fingerprint: Fingerprint = Fingerprint()
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Welcome:
    """First message of a link, from the service.

    `drafter_needs`: what each of `drafters` reads of the target's hidden states; empty: none of them reads any.
    `default_name`: the name that the first of `drafters` was configured with; sessions may ask for it by this, too.
    `features`: which hidden states a target can send; None: none. `mixed_leases`: whether it takes such.
    """

    incarnation: str
    fingerprint: Fingerprint
    max_length: int
    max_sessions: int
    max_proposal_nodes: int = MAX_PROPOSAL_NODES
    max_frame_bytes: int = MAX_FRAME_BYTES
    drafters: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION
    max_lease: int = 0
    max_prefetched: int = 0
    reports_prompts: bool = False
    drafter_needs: tuple[FeatureNeed, ...] = ()
    features: FeatureOffer | None = None
    default_name: str = ""
    mixed_leases: bool = False

    def __post_init__(self) -> None:
        needs, drafters = len(self.drafter_needs), len(self.drafters)
        require(needs in (0, drafters), "welcome drafter_needs", needs, f"0 or {drafters}, one for each drafter")

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The names that sessions may ask for: each drafter's, and behind the first one the default's own."""
        own = (self.default_name,) if self.default_name and self.drafters else ()
        return (*self.drafters[:1], *own, *self.drafters[1:])

    def need_of(self, drafter: str) -> FeatureNeed:
        """What a drafter reads of the target's hidden states; an empty name is the default's."""
        if not self.drafter_needs:
            return NO_FEATURES
        name = self.drafters[0] if drafter in ("", self.default_name) else drafter
        return self.drafter_needs[self.drafters.index(name)] if name in self.drafters else NO_FEATURES


@dataclass(frozen=True)
class ServiceStatus:
    """What a service is doing now."""

    incarnation: str
    fingerprint: Fingerprint
    sessions: int
    kv_rows: int
    max_kv_rows: int
    queue_length: int
    steps: int
    resident_bytes: int
    frames_sent: int
