"""Other texts that a request's text may go on as: the tenant's finished ones, and those that the operator gave. Pure.

Nothing crosses tenants: a text is found by requests of the tenant that it was generated for, and by no others. Even
so a proposal that is accepted makes its request faster, so whoever may send requests of a tenant can find out by time
what others of that tenant were told. So tenants are named by the operator, and none is by default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.protocol.proposal import CORPUS, SHARED
from paceline.sampling.suffix import MAX_TOKEN_BYTES, NO_TOKEN, SuffixAutomaton

EVERY_TENANT = "*"
VOLUMES = 4
"""Parts of the memory for finished texts: the oldest is forgotten as a whole, since an automaton only grows."""


@dataclass(frozen=True, eq=False)
class Volume:
    """Texts that are searched together; under the drafter's name their tokens are proposed."""

    drafter: str
    text: SuffixAutomaton
    tenant: str = ""
    """Whose texts they are; of a corpus: nobody's."""


class Library:
    """Finished texts by tenant, the oldest forgotten first, and the corpus.

    Args:
        corpus: for the requests of all; None: there is none.
        sharing: tenants whose finished texts are kept, `EVERY_TENANT` for all of them, each for itself.
        max_bytes: of memory for the finished texts of all.
    """

    def __init__(
        self, corpus: SuffixAutomaton | None = None, sharing: Collection[str] = (), max_bytes: int = 0
    ) -> None:
        self._corpus = () if corpus is None else (Volume(CORPUS, corpus),)
        self._sharing = frozenset(sharing)
        self._max_bytes = max_bytes
        self._finished: deque[Volume] = deque()

    @property
    def used_bytes(self) -> int:
        """Of finished texts."""
        return sum(volume.text.used_bytes for volume in self._finished)

    def volumes(self, tenant: str) -> tuple[Volume, ...]:
        """What requests of a tenant may be drafted from now."""
        return (*(volume for volume in self._finished if volume.tenant == tenant), *self._corpus)

    def keep(self, tenant: str, tokens: Sequence[int]) -> None:
        """A request of a tenant has finished with this output; of a very long one the end is kept."""
        if not tokens or self._sharing.isdisjoint((tenant, EVERY_TENANT)):
            return
        part = self._max_bytes // VOLUMES
        latest = [volume for volume in self._finished if volume.tenant == tenant][-1:]
        if not latest or latest[0].text.used_bytes > part:
            latest = [Volume(SHARED, SuffixAutomaton(), tenant)]
            self._finished += latest
        latest[0].text.extend((*tokens[-(part // MAX_TOKEN_BYTES) :], NO_TOKEN))
        while self.used_bytes > self._max_bytes:
            self._finished.popleft()
