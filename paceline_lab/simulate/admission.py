"""Which sessions a simulated target has rows for, and which prefixes it has computed: `target_service/admission.py`.

A session reserves the rows that it may come to need. The rows that nobody has reserved hold shared prefixes, of
which the one that was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from paceline.engine.blocks import BLOCK_ROWS
from paceline_lab.simulate.events import Agenda
from paceline_lab.simulate.specs import TargetSpec


class AdmittedSession(Protocol):
    """A session as admission sees it.

    Attributes:
        priority: of those that wait the highest comes first.
        kv_rows: that it reserves.
        prefix_key, prefix_rows: the prefix that it shares with others, 0: none, and its length.
        prefill_left: rows of its prefix that are to be computed.
        prompt_rows: of its prompt.
    """

    key: int
    priority: int
    kv_rows: int
    prefix_key: int
    prefix_rows: int
    prefill_left: int
    prompt_rows: int


class SimulatedAdmission:
    """Sessions that wait and sessions that hold rows."""

    def __init__(self, agenda: Agenda, spec: TargetSpec) -> None:
        self._agenda = agenda
        self._spec = spec
        self.waiting: list[AdmittedSession] = []
        self.held: dict[int, AdmittedSession] = {}
        self._reserved = 0
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._computing: dict[int, int] = {}
        """Which session computes a shared prefix."""
        self._since = 0.0
        self.row_ms = 0.0
        """Reserved rows times milliseconds."""
        self.most_reserved = self.most_waiting = 0
        self.waited_for_rows = 0
        """Times that a session found no rows."""

    def enter(self, session: AdmittedSession) -> bool:
        """A session comes; False: it is refused."""
        if len(self.waiting) >= self._spec.max_queue:
            return False
        place = len(self.waiting)
        while place and self.waiting[place - 1].priority < session.priority:
            place -= 1
        self.waiting.insert(place, session)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return True

    def admit(self) -> list[AdmittedSession]:
        """Let in those that there is room for, in their order; of sessions that share a prefix one computes it."""
        admitted: list[AdmittedSession] = []
        for session in self.waiting:
            if len(self.held) >= self._spec.max_sessions:
                break
            if session.prefix_key and self._spec.prefix_cache and session.prefix_key in self._computing:
                continue
            if self.held and self._spec.kv_rows and self._reserved + session.kv_rows > self._spec.kv_rows:
                self.waited_for_rows += 1
                break
            self._hold(session)
            admitted.append(session)
        if admitted:
            self.waiting = [session for session in self.waiting if session.key not in self.held]
        return admitted

    def computed(self, session: AdmittedSession) -> None:
        """A session's prefix is there: others may share it."""
        key = session.prefix_key
        if self._computing.get(key) == session.key:
            del self._computing[key]
            self._cached[key] = session.prefix_rows
            self._evict()

    def leave(self, session: AdmittedSession) -> None:
        """A session has ended."""
        if self.held.pop(session.key, None) is not None:
            self._reserve(-session.kv_rows)
        elif session in self.waiting:
            self.waiting.remove(session)
        if self._computing.get(session.prefix_key) == session.key:
            del self._computing[session.prefix_key]

    def clear(self) -> list[AdmittedSession]:
        """All are gone, and every row; returns them."""
        lost = [*self.held.values(), *self.waiting]
        self._reserve(-self._reserved)
        self.waiting, self.held = [], {}
        self._cached.clear()
        self._computing.clear()
        return lost

    def mean_share(self, until_ms: float) -> float:
        """Of its rows, reserved on average; 0 where there is no bound."""
        self._reserve(0)
        return self.row_ms / (self._spec.kv_rows * until_ms) if self._spec.kv_rows and until_ms else 0.0

    def _hold(self, session: AdmittedSession) -> None:
        self.held[session.key] = session
        self._reserve(session.kv_rows)
        if not session.prefix_key or not self._spec.prefix_cache:
            return
        rows = self._cached.get(session.prefix_key, 0) // BLOCK_ROWS * BLOCK_ROWS
        if rows:
            self._cached.move_to_end(session.prefix_key)
            session.prefill_left = max(0, session.prefill_left - rows)
        elif session.prefill_left:
            self._computing[session.prefix_key] = session.key

    def _reserve(self, rows: int) -> None:
        now = self._agenda.now
        self.row_ms += self._reserved * (now - self._since)
        self._since = now
        self._reserved += rows
        self.most_reserved = max(self.most_reserved, self._reserved)
        self._evict()

    def _evict(self) -> None:
        if not self._spec.kv_rows:
            return
        room = self._spec.kv_rows - self._reserved
        while self._cached and sum(self._cached.values()) > room:
            self._cached.popitem(last=False)
