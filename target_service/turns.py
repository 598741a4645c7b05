"""In which order sessions of several tenants come: none of them waits for all that another one has sent."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from target_service.session import Session

MAX_REMEMBERED = 1024
"""Tenants whose latest turn is known: as many as a coordinator may have keys."""


class Turns:
    """Whose session is let in next: that of the tenant that holds the fewest KV rows.

    Rows are what sessions hold of the engine, and for as long as they hold them; so who holds
    the least has had the least, whether its sessions are few and long or many and short. Of those who
    hold as much, the one whose turn was longest ago comes first.
    """

    def __init__(self) -> None:
        self._rows = Counter[str]()
        self._latest: dict[str, int] = {}
        self._turn = itertools.count(1)

    def hold(self, session: Session) -> None:
        """A session has been let in."""
        tenant = session.facts.tenant
        self._rows[tenant] += session.max_rows
        self._latest.pop(tenant, None)
        self._latest[tenant] = next(self._turn)
        if len(self._latest) > MAX_REMEMBERED:
            del self._latest[next(iter(self._latest))]

    def free(self, session: Session) -> None:
        """A session that was let in has ended."""
        tenant = session.facts.tenant
        self._rows[tenant] -= session.max_rows
        if not self._rows[tenant]:
            del self._rows[tenant]

    def order(self, waiting: Iterable[Session], chosen: Sequence[Session]) -> Iterator[Session]:
        """Sessions that wait, in the order of their tenants' turns, each tenant's as they came.

        Args:
            waiting: oldest first.
            chosen: of those that came already, the ones that are to be let in; grows meanwhile.
        """
        queues, rows = _by_tenant(waiting), Counter(self._rows)
        counted = 0
        while queues:
            tenant = min(queues, key=lambda each: (rows[each], self._latest.get(each, 0)))
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
            for session in chosen[counted:]:
                rows[session.facts.tenant] += session.max_rows
            counted = len(chosen)


def alternating(sessions: Iterable[Session]) -> list[Session]:
    """The first session of each tenant, then the second of each: those of one tenant keep their order."""
    turns = itertools.zip_longest(*_by_tenant(sessions).values())
    return [session for session in itertools.chain.from_iterable(turns) if session is not None]


def _by_tenant(sessions: Iterable[Session]) -> dict[str, deque[Session]]:
    queues: dict[str, deque[Session]] = {}
    for session in sessions:
        queues.setdefault(session.facts.tenant, deque()).append(session)
    return queues
