"""The texts besides a request's own that proposals are copied from: its tenant's finished texts, and a corpus. Pure.

Nothing crosses tenants: a finished text serves only requests of the tenant that it was generated for. Within a tenant
an accepted proposal makes its request faster, so timing tells one caller of the tenant what others were answered.
Therefore the operator names the tenants whose texts are kept; by default there are none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.protocol.proposal import CORPUS, SHARED
from paceline.sampling.suffix import MAX_TOKEN_BYTES, NO_TOKEN, SuffixAutomaton

EVERY_TENANT = "*"
VOLUMES = 4
"""Parts of the memory for finished texts. An automaton only grows, so the oldest part is dropped as a whole."""


@dataclass(frozen=True, eq=False)
class Volume:
    """Texts that are searched together; `drafter` names the proposals that are copied from them."""

    drafter: str
    text: SuffixAutomaton
    tenant: str = ""
    """The texts' tenant; empty for the corpus."""


class Library:
    """The corpus, and finished texts by tenant, of which the oldest are dropped first.

    Args:
        corpus: serves every request; None: there is none.
        sharing: tenants whose finished texts are kept, each for itself; `EVERY_TENANT`: all tenants.
        max_bytes: memory for the finished texts of all tenants together.
    """

    def __init__(
        self, corpus: SuffixAutomaton | None = None, sharing: Collection[str] = (), max_bytes: int = 0
    ) -> None:
        self._corpus = () if corpus is None else (Volume(CORPUS, corpus),)
        self._sharing = frozenset(sharing)
        self._max_bytes = max_bytes
        self._volumes: deque[Volume] = deque()

    @property
    def used_bytes(self) -> int:
        """Memory that finished texts take."""
        return sum(volume.text.used_bytes for volume in self._volumes)

    def volumes(self, tenant: str) -> tuple[Volume, ...]:
        """The volumes that a tenant's requests may copy from now."""
        return (*(volume for volume in self._volumes if volume.tenant == tenant), *self._corpus)

    def keep(self, tenant: str, tokens: Sequence[int]) -> None:
        """Keep the output of a finished request of a tenant; of a very long output its end."""
        if not tokens or self._sharing.isdisjoint((tenant, EVERY_TENANT)):
            return
        part = self._max_bytes // VOLUMES
        latest = [volume for volume in self._volumes if volume.tenant == tenant][-1:]
        if not latest or latest[0].text.used_bytes > part:
            latest = [Volume(SHARED, SuffixAutomaton(), tenant)]
            self._volumes += latest
        latest[0].text.extend((*tokens[-(part // MAX_TOKEN_BYTES) :], NO_TOKEN))
        while self.used_bytes > self._max_bytes:
            self._volumes.popleft()
