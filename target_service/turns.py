"""The order of sessions of several tenants: no tenant waits for all sessions of another one."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from target_service.session import Session

MAX_REMEMBERED = 1024
"""Most tenants whose latest turn is remembered: as many as a coordinator may have keys."""


class Turns:
    """Orders waiting sessions: first those of the tenant with the fewest KV rows.

    KV rows are what sessions use of the engine, for as long as they use them. So the tenant with
    the fewest rows has had the least, whether its sessions are few and long or many and short. Of tenants
    with equal rows the one whose turn was longest ago comes first.
    """

    def __init__(self) -> None:
        self._rows = Counter[str]()
        self._latest: dict[str, int] = {}
        self._turn = itertools.count(1)

    def hold(self, session: Session) -> None:
        """Count the rows of an admitted session."""
        tenant = session.facts.tenant
        self._rows[tenant] += session.max_rows
        self._latest.pop(tenant, None)
        self._latest[tenant] = next(self._turn)
        if len(self._latest) > MAX_REMEMBERED:
            del self._latest[next(iter(self._latest))]

    def free(self, session: Session) -> None:
        """Remove the rows of an admitted session that has ended."""
        tenant = session.facts.tenant
        self._rows[tenant] -= session.max_rows
        if not self._rows[tenant]:
            del self._rows[tenant]

    def order(self, waiting: Iterable[Session], picks: Sequence[Session]) -> Iterator[Session]:
        """The waiting sessions in the order of their tenants' turns; those of one tenant keep their order.

        Args:
            waiting: oldest first.
            picks: the sessions so far that will be admitted; the caller extends it during the iteration.
        """
        queues, rows = _by_tenant(waiting), Counter(self._rows)
        count = 0
        while queues:
            tenant = min(queues, key=lambda each: (rows[each], self._latest.get(each, 0)))
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
            for session in picks[count:]:
                rows[session.facts.tenant] += session.max_rows
            count = len(picks)


def alternating(sessions: Iterable[Session]) -> list[Session]:
    """The first session of each tenant, then the second of each; those of one tenant keep their order."""
    turns = itertools.zip_longest(*_by_tenant(sessions).values())
    return [session for session in itertools.chain.from_iterable(turns) if session is not None]


def _by_tenant(sessions: Iterable[Session]) -> dict[str, deque[Session]]:
    queues: dict[str, deque[Session]] = {}
    for session in sessions:
        queues.setdefault(session.facts.tenant, deque()).append(session)
    return queues
