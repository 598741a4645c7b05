"""How sessions are admitted: they wait for their grammar, then for room and for blocks that another one computes.

Changed on the event loop, under the scheduler's lock where the engine's thread looks at it.
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
from target_service.prefixes import PendingPrefixes
from target_service.session import Session, make_processors
from target_service.turns import Turns

logger = logging.getLogger(__name__)

Reserved = list[int | PacelineError]
"""For each session tried: the rows of its prefix that it holds already, or why it can't be served."""
MakeRoom = Callable[[Sequence[Session], Sequence[Session]], Awaitable[Reserved]]
"""Runs `make_room` on the engine's thread."""


class Admission:
    """Sessions that wait to be admitted, and sessions whose rows are to be freed.

    Args:
        max_sessions: most sessions that hold rows at once.
        max_queue: most sessions that wait, of which no tenant may have so many that others find no place.
        max_link_rows: most KV rows that the sessions of one link hold, unless it has but one session.
        grammars: follows grammars; None: this target knows no tokenizer.
        make_room: frees and reserves rows.
        admitted: called with each session that has its rows.
        failed: called with each session that can't be served.
        wake: called when there is something to settle.
    """

    def __init__(
        self,
        max_sessions: int,
        max_queue: int,
        max_link_rows: int,
        grammars: Grammars | None,
        *,
        make_room: MakeRoom,
        admitted: Callable[[Session], None],
        failed: Callable[[Session, PacelineError], None],
        wake: Callable[[], None],
    ) -> None:
        self._max_sessions = max_sessions
        self._places = Places("max_queue", max_queue, RETRY_AFTER_MS)
        self._queued: set[int] = set()
        """Keys of the sessions that have a place in the queue."""
        self._max_link_rows = max_link_rows
        self._grammars = grammars
        self._make_room, self._on_admitted, self._on_failed, self._wake = make_room, admitted, failed, wake
        self._compiling: dict[int, asyncio.Task[None]] = {}
        self._waiting: deque[Session] = deque()
        self._closing: list[Session] = []
        self._holding = 0
        self._link_rows = Counter[SessionOwner]()
        """What the admitted sessions of each link hold."""
        self._turns = Turns()
        self._no_room = False
        """Whether one that waits found no room, and nobody has left since: then nobody is tried."""
        self.prefixes = PendingPrefixes()

    def __len__(self) -> int:
        """Sessions that wait."""
        return len(self._places)

    def __contains__(self, key: int) -> bool:
        """Whether the session of this key waits, for its grammar or for room."""
        return key in self._queued

    @property
    def is_settled(self) -> bool:
        """Whether no session waits for room and no rows are to be freed."""
        return not self._waiting and not self._closing

    def check(self, facts: SessionSpec) -> None:
        """Refuse a session for which there is no place.

        Raises:
            Unsupported: it has a grammar, and this target knows no tokenizer.
            Overloaded: the queue is full, or what is left of it is for other tenants.
        """
        if facts.sampling.grammar is not None and self._grammars is None:
            raise Unsupported("grammar: this target knows no tokenizer")
        self._places.check(facts.tenant)

    def enter(self, session: Session) -> None:
        """Wait for room; before that for the grammar, which another process compiles."""
        facts = session.facts
        session.processors = make_processors(facts, session.foreseen)
        if facts.sampling.grammar is not None and self._grammars is not None:
            session.grammar = self._grammars.open(facts.sampling.grammar, facts.end_token_ids, facts.prompt_length)
        # Only now: a session that did not come this far never leaves.
        self._places.take(facts.tenant)
        self._queued.add(session.key)
        if session.grammar is None:
            self._waiting.append(session)
            self._wake()
            return
        task = asyncio.create_task(self._await_grammar(session, session.grammar))
        self._compiling[session.key] = task
        task.add_done_callback(lambda _: self._compiling.pop(session.key))

    def leave(self, session: Session) -> None:
        """A session has ended: its rows, if it has any, are freed when next there is time."""
        self._leave_queue(session)
        self.prefixes.end(session)
        if session.grammar is not None:
            session.grammar.close()
        if (compiling := self._compiling.get(session.key)) is not None:
            compiling.cancel()
        if session.admitted:
            self._closing.append(session)
        elif session in self._waiting:
            self._waiting.remove(session)
            # It may be the one that found no room; those behind it may want less.
            self._no_room = False

    def stop(self) -> None:
        """Follow no grammars any more."""
        for task in self._compiling.values():
            task.cancel()
        if self._grammars is not None:
            self._grammars.close()

    async def settle(self, rows_to_copy: int) -> int:
        """Free what was closed and admit what there is room for; returns what is left of `rows_to_copy`.

        Of sessions that share a prefix one is let in at a time, until its blocks
        are there. It ends, with more to do, when it has copied more rows than it may.
        """
        while rows_to_copy > 0:
            copied = await self._settle_once()
            if copied is None:
                return rows_to_copy
            rows_to_copy -= copied
        self._wake()
        return rows_to_copy

    async def _settle_once(self) -> int | None:
        """Returns the rows copied for the sessions admitted, or None if there was nothing to do."""
        closing, self._closing = self._closing, []
        self._holding -= len(closing)
        for session in closing:
            self._hold(session.owner, -session.max_rows)
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
            session.claimed = 0
            if isinstance(result, Overloaded):
                self._no_room = not session.closed
            elif result is not None:
                self._on_failed(session, result)
        return sum(result for result in results if isinstance(result, int))

    def _next_to_open(self) -> list[Session]:
        room = 0 if self._no_room else self._max_sessions - self._holding
        chosen: list[Session] = []
        if not self._waiting or room <= 0:
            return chosen
        wanted = Counter(self._link_rows)
        for session in self._turns.order(self._waiting, chosen):
            rows = wanted[session.owner] + session.max_rows
            alone = rows == session.max_rows
            if (alone or rows <= self._max_link_rows) and not self.prefixes.holds(session):
                self.prefixes.claim(session)
                wanted[session.owner] = rows
                chosen.append(session)
            if len(chosen) >= room:
                break
        return chosen

    def _hold(self, owner: SessionOwner, rows: int) -> None:
        """Count rows of a link; one that holds none is forgotten."""
        self._link_rows[owner] += rows
        if not self._link_rows[owner]:
            del self._link_rows[owner]

    def _leave_queue(self, session: Session) -> None:
        """A session needs its place no longer, if it has one."""
        if session.key in self._queued:
            self._queued.remove(session.key)
            self._places.give_back(session.facts.tenant)

    def _admit(self, session: Session, reused: int) -> None:
        self._holding += 1
        self._hold(session.owner, session.max_rows)
        self._turns.hold(session)
        self._leave_queue(session)
        session.admitted = True
        # Cached rows of which something is to be told are computed again: the first chunk rolls the engine back.
        session.prefilled = session.reused = session.reusable(reused)
        self.prefixes.computed(session, reused)
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


def make_room(engine: Engine, closing: Sequence[Session], opening: Sequence[Session]) -> Reserved:
    """Free closed sessions, then reserve rows for waiting ones, in order, until one finds no room.

    Returns:
        One result for each session tried. The last is `Overloaded` where there was no room.
    """
    for session in closing:
        _free(engine, session)
    results: Reserved = []
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
        reused = engine.open(session.key, session.max_rows, session.prefix)
        if session.features is not None:
            feature_source(engine).keep_features(session.key, session.features.need)
        return reused
    except PacelineError as refusal:
        error = refusal
    except Exception as failure:
        logger.exception("open failed: session=%d", session.id)
        error = session.defect(failure)
    # What failed may have come behind the reservation, and nobody closes a session that was not admitted.
    _free(engine, session)
    return error
