"""Admission of sessions: they wait for their grammar, then for room and for blocks that another session computes.

It is changed on the event loop, under the scheduler's lock where the engine's thread reads it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

from paceline.access.places import Places
from paceline.engine.features import feature_source
from paceline.engine.interface import Engine
from paceline.grammars.sessions import Grammars, GrammarSession
from paceline.protocol.errors import Overloaded, PacelineError, Unsupported
from paceline.protocol.session import SessionSpec
from paceline.rpc.sessions import RETRY_AFTER_MS, SessionOwner
from target_service.batching import Turns
from target_service.session import Session, make_processors

logger = logging.getLogger(__name__)


class PendingPrefixes:
    """Blocks by key, and the opening session that computes each.

    Invariant: only admitted sessions claim blocks, and they compute them or
    end, so no session waits for ever.
    """

    def __init__(self) -> None:
        self._claims: dict[bytes, int] = {}

    def holds(self, session: Session) -> bool:
        """Whether another session computes a block that this one needs."""
        if session.awaits not in self._claims:
            usable = session.reusable(session.prefill_length)
            digests = (key.digest for key in reversed(session.keys) if key.end <= usable)
            session.awaits = next((digest for digest in digests if digest in self._claims), None)
        return session.awaits is not None

    def claim(self, session: Session) -> None:
        """Claim the blocks that no other session computes for a session that is admitted."""
        for key in session.keys:
            self._claims.setdefault(key.digest, session.key)

    def release(self, session: Session, rows: int) -> None:
        """Release the sessions that wait for the first `rows` rows of a session's prefix, which are computed."""
        self._drop(session, rows)

    def end(self, session: Session) -> None:
        """Release all that wait for the session."""
        self._drop(session, session.prefill_length)

    def _drop(self, session: Session, rows: int) -> None:
        while session.released_blocks < len(session.keys) and session.keys[session.released_blocks].end <= rows:
            digest = session.keys[session.released_blocks].digest
            if self._claims.get(digest) == session.key:
                del self._claims[digest]
            session.released_blocks += 1


Reservations = list[int | PacelineError]
"""For each session that was tried: the rows of its prefix that are cached, or why it can't be served."""
MakeRoom = Callable[[Sequence[Session], Sequence[Session]], Awaitable[Reservations]]
"""Runs `make_room` on the engine's thread."""


class Admission:
    """Sessions that wait to be admitted, and sessions whose rows are to be freed.

    Args:
        max_sessions: most sessions that have rows at once.
        max_queue: most sessions that wait; no tenant may have so many of them that others find no place.
        max_link_rows: most KV rows of the sessions of one link, unless it has only one session.
        session_rows: KV rows whose room each session takes beside its own.
        grammars: follows grammars; None: this target has no tokenizer.
        make_room: frees and reserves rows.
        on_admitted: called with each session whose rows are reserved.
        on_failed: called with each session that can't be served.
        wake: called when there is something to settle.
    """

    def __init__(
        self,
        max_sessions: int,
        max_queue: int,
        max_link_rows: int,
        session_rows: int,
        grammars: Grammars | None,
        *,
        make_room: MakeRoom,
        on_admitted: Callable[[Session], None],
        on_failed: Callable[[Session, PacelineError], None],
        wake: Callable[[], None],
    ) -> None:
        self._max_sessions = max_sessions
        self._places = Places("max_queue", max_queue, RETRY_AFTER_MS)
        self._queue_keys: set[int] = set()
        """Keys of the sessions that have a place in the queue."""
        self._max_link_rows, self._session_rows = max_link_rows, session_rows
        self._grammars = grammars
        self._make_room, self._on_admitted, self._on_failed, self._wake = make_room, on_admitted, on_failed, wake
        self._compiling: dict[int, asyncio.Task[None]] = {}
        self._waiting: deque[Session] = deque()
        self._closing: list[Session] = []
        self._holding = 0
        self._link_rows = Counter[SessionOwner]()
        """KV rows of the admitted sessions of each link."""
        self._turns = Turns()
        self._no_room = False
        """Whether a waiting session found no room and none has left since: then no session is tried."""
        self.prefixes = PendingPrefixes()

    def __len__(self) -> int:
        """The number of sessions that wait."""
        return len(self._places)

    def __contains__(self, key: int) -> bool:
        """Whether the session of this key waits, for its grammar or for room."""
        return key in self._queue_keys

    @property
    def is_settled(self) -> bool:
        """Whether no session waits for room and no rows are to be freed."""
        return not self._waiting and not self._closing

    def check(self, facts: SessionSpec) -> None:
        """Refuse a session for which there is no place.

        Raises:
            Unsupported: it has a grammar, and this target has no tokenizer.
            Overloaded: the queue is full, or its last places are for other tenants.
        """
        if facts.sampling.grammar is not None and self._grammars is None:
            raise Unsupported("grammar: this target knows no tokenizer")
        self._places.check(facts.tenant)

    def enter(self, session: Session) -> None:
        """Queue a session for room; before that it waits for its grammar, which another process compiles."""
        facts = session.facts
        session.processors = make_processors(facts, session.follower)
        if facts.sampling.grammar is not None and self._grammars is not None:
            session.grammar = self._grammars.open(facts.sampling.grammar, facts.end_token_ids, facts.prompt_length)
        # The place is taken last: a session that failed before this never leaves.
        self._places.take(facts.tenant)
        self._queue_keys.add(session.key)
        if session.grammar is None:
            self._waiting.append(session)
            self._wake()
            return
        task = asyncio.create_task(self._await_grammar(session, session.grammar))
        self._compiling[session.key] = task
        task.add_done_callback(lambda _: self._compiling.pop(session.key))

    def leave(self, session: Session) -> None:
        """Remove a session that has ended; its rows, if it has any, are freed at the next opportunity."""
        self._leave_queue(session)
        self.prefixes.end(session)
        if session.grammar is not None:
            session.grammar.close()
        if (compiling := self._compiling.get(session.key)) is not None:
            compiling.cancel()
        if session.is_admitted:
            self._closing.append(session)
        elif session in self._waiting:
            self._waiting.remove(session)
            # It may be the session that found no room; those after it may need less.
            self._no_room = False

    def stop(self) -> None:
        """Stop following grammars."""
        for task in self._compiling.values():
            task.cancel()
        if self._grammars is not None:
            self._grammars.close()

    async def settle(self, rows_to_copy: int) -> int:
        """Free the rows of closed sessions and admit others while there is room; returns the rest of `rows_to_copy`.

        Of sessions that share a prefix one is admitted at a time, until its blocks
        are there. It ends, with more to do, when it has copied more rows than it may.
        """
        while rows_to_copy > 0:
            rows = await self._settle_once()
            if rows is None:
                return rows_to_copy
            rows_to_copy -= rows
        self._wake()
        return rows_to_copy

    async def _settle_once(self) -> int | None:
        """Do so once; returns the rows copied for the admitted sessions, or None if there was nothing to do."""
        closing, self._closing = self._closing, []
        self._holding -= len(closing)
        for session in closing:
            self._hold(session.owner, -self._rows_of(session))
            self._turns.free(session)
        self._no_room = self._no_room and not closing
        opening = self._next_to_open()
        if not closing and not opening:
            return None
        results = await self._make_room(closing, opening)
        for session, result in itertools.zip_longest(opening, results):
            if isinstance(result, int):
                self._admit(session, result)
                continue
            self.prefixes.end(session)
            session.released_blocks = 0
            if isinstance(result, Overloaded):
                self._no_room = not session.closed
            elif result is not None:
                self._on_failed(session, result)
        return sum(result for result in results if isinstance(result, int))

    def _next_to_open(self) -> list[Session]:
        room = 0 if self._no_room else self._max_sessions - self._holding
        sessions: list[Session] = []
        if not self._waiting or room <= 0:
            return sessions
        link_rows = Counter(self._link_rows)
        for session in self._turns.order(self._waiting, sessions):
            rows = link_rows[session.owner] + self._rows_of(session)
            only_one = rows == self._rows_of(session)
            if (only_one or rows <= self._max_link_rows) and not self.prefixes.holds(session):
                self.prefixes.claim(session)
                link_rows[session.owner] = rows
                sessions.append(session)
            if len(sessions) >= room:
                break
        return sessions

    def _rows_of(self, session: Session) -> int:
        return session.max_rows + self._session_rows

    def _hold(self, owner: SessionOwner, rows: int) -> None:
        """Add rows to a link's count; a link without rows is forgotten."""
        self._link_rows[owner] += rows
        if not self._link_rows[owner]:
            del self._link_rows[owner]

    def _leave_queue(self, session: Session) -> None:
        """Give a session's place in the queue back, if it has one."""
        if session.key in self._queue_keys:
            self._queue_keys.remove(session.key)
            self._places.give_back(session.facts.tenant)

    def _admit(self, session: Session, reused_rows: int) -> None:
        self._holding += 1
        self._hold(session.owner, self._rows_of(session))
        self._turns.hold(session)
        self._leave_queue(session)
        session.is_admitted = True
        # Cached rows with something to report are computed again: the first chunk rolls the engine back.
        session.prefilled_rows = session.reused_rows = session.reusable(reused_rows)
        self.prefixes.release(session, reused_rows)
        if session.closed:
            # It was closed while its rows were reserved.
            self._closing.append(session)
            self._wake()
            return
        self._waiting.remove(session)
        self._on_admitted(session)

    async def _await_grammar(self, session: Session, grammar: GrammarSession) -> None:
        try:
            await asyncio.wrap_future(grammar.compilation)
        except PacelineError as error:
            self._on_failed(session, error)
        except Exception as error:
            logger.exception("grammar failed: session=%d", session.id)
            self._on_failed(session, session.defect(error))
        else:
            if not session.closed:
                self._waiting.append(session)
                self._wake()


def make_room(engine: Engine, closing: Sequence[Session], opening: Sequence[Session]) -> Reservations:
    """Free closed sessions, then reserve rows for waiting ones, in order, until one finds no room.

    Returns:
        One result for each session that was tried. The last is `Overloaded` where there was no room.
    """
    for session in closing:
        _free(engine, session)
    results: Reservations = []
    for session in opening:
        results.append(_reserve(engine, session))
        if isinstance(results[-1], Overloaded):
            break
    return results


def _free(engine: Engine, session: Session) -> None:
    try:
        engine.close(session.key)
    except Exception:
        logger.exception("close failed: session=%d", session.id)


def _reserve(engine: Engine, session: Session) -> int | PacelineError:
    try:
        reused_rows = engine.open(session.key, session.max_rows, session.prefix)
        if session.features is not None:
            feature_source(engine).keep_features(session.key, session.features.need)
        return reused_rows
    except PacelineError as refusal:
        error = refusal
    except Exception as failure:
        logger.exception("open failed: session=%d", session.id)
        error = session.defect(failure)
    # It may have failed after the reservation, and nobody closes a session that was not admitted.
    _free(engine, session)
    return error
