"""The simulated target: continuous batching, leases and prefetched proposals, with the service's own `Batcher`.

A step has the ready rounds of all sessions and a chunk of the prefixes of those that open, shared by the service's
own rule. While a draft that shares its cores works, a step goes on at `alone ÷ beside` of its speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from paceline_lab.simulate.admission import AdmittedSession, SimulatedAdmission
from paceline_lab.simulate.events import Agenda
from paceline_lab.simulate.lines import StatedLine, TrueLine
from paceline_lab.simulate.specs import TargetSpec
from target_service.batching import Batcher, BatchingWindow
from target_service.step import share_chunk


class VerifiedClient(AdmittedSession, Protocol):
    """A session as its target sees it."""

    tokens: int
    at_target: int
    prefilled_rows: int
    round_rows: int
    ready_at: float
    drafting: bool

    def answered(self, begun: float, step_ms: float, sessions: int, rows: int) -> bool:
        """A step with its round is done; says whether it goes on by itself."""

    def target_lost(self) -> None:
        """The target has failed."""


class SimulatedTarget:
    """Serves all ready rounds in one step."""

    def __init__(self, agenda: Agenda, spec: TargetSpec, lie: float = 1.0) -> None:
        self._agenda = agenda
        self._spec = spec
        beside = spec.beside if spec.shares_cores else spec.alone
        self._alone, self._beside = TrueLine(spec.alone), TrueLine(beside)
        self.stated_alone, self.stated_beside = StatedLine(spec.alone, lie), StatedLine(beside, lie)
        self._lie = lie
        self._batcher = Batcher()
        self.admission = SimulatedAdmission(agenda, spec)
        self._opening: dict[int, VerifiedClient] = {}
        self._ready: dict[int, VerifiedClient] = {}
        self._step: list[VerifiedClient] = []
        self._window: BatchingWindow | None = None
        self._busy = False
        self._timer = 0
        self._prefix_rows = 0
        self._begun = self._left_ms = self._since = 0.0
        self._ended = -1.0
        self._speed = 1.0
        self._slowed = 1.0
        self._drafting = False
        self.is_up = True
        self.drains = False
        self.in_step = self.rows = self.steps = self.rows_computed = 0
        self.busy_ms = 0.0

    @property
    def queue(self) -> int:
        """Sessions and rounds that wait."""
        return len(self.admission.waiting) + len(self._opening) + len(self._ready)

    @property
    def sessions(self) -> int:
        """Sessions that have their rows."""
        return len(self.admission.held)

    @property
    def load(self) -> int:
        """Sessions here, those that wait included."""
        return len(self.admission.held) + len(self.admission.waiting)

    def slower(self, factor: float) -> None:
        """From now on steps take so many times as long."""
        self._alone.factor = self._beside.factor = factor

    def open(self, session: VerifiedClient) -> bool:
        """A session comes with its prefix and first round; False: too many wait already, it is refused."""
        if not self.is_up or not self.admission.enter(session):
            return False
        self._admit()
        return True

    def submit(self, session: VerifiedClient) -> None:
        """A round has come."""
        if session.key not in self.admission.held:
            return  # sent before its coordinator knew that the target has failed
        now = self._agenda.now
        self._batcher.note_return(session.key, now / 1e3)
        session.ready_at = now
        self._ready[session.key] = session
        self._try_start()

    def leave(self, session: VerifiedClient) -> None:
        """A session ends before its text has."""
        self._opening.pop(session.key, None)
        self._ready.pop(session.key, None)
        self._batcher.forget(session.key)
        self.admission.leave(session)
        self._admit()

    def fail(self) -> None:
        """It ends, and with it all that it holds."""
        self.is_up = self._busy = False
        self._timer += 1
        lost: list[Any] = self.admission.clear()
        self._batcher, self._window = Batcher(), None
        self._opening, self._ready, self._step = {}, {}, []
        self.stated_alone = StatedLine(self._spec.alone, self._lie)
        for session in lost:
            session.target_lost()

    def draft_works(self, works: bool) -> None:
        """A draft on the same cores has begun or ended a step."""
        self._drafting = works
        if not self._busy or self._slowed == 1:
            return
        now = self._agenda.now
        self._left_ms -= (now - self._since) * self._speed
        self._since, self._speed = now, self._slowed if works else 1.0
        self._expect_end()

    def _admit(self) -> None:
        admitted: list[Any] = self.admission.admit()
        for session in admitted:
            self._opening[session.key] = session
        self._try_start()

    def _try_start(self) -> None:
        served = len(self._ready) + len(self._opening)
        if self._busy or not served:
            return
        batcher, now = self._batcher, self._agenda.now / 1e3
        if self._window is None:
            left = sum(session.prefill_left for session in self._opening.values()) if self._opening else 0
            self._window = batcher.window(served, now, min(left, self._spec.prefill_chunk))
            if self._window.sessions and self._window.end_s > now:
                self._timer += 1
                self._agenda.at(self._window.end_s * 1e3, self._window_over, self._timer)
        if batcher.is_away(self._window.sessions) and now < self._window.end_s:
            return
        self._start()

    def _window_over(self, timer: int) -> None:
        if timer == self._timer and not self._busy and self._window is not None:
            self._start()

    def _start(self) -> None:
        self._window = None
        now = self._agenda.now
        step = self._rounds()
        rows = 0
        for session in step:
            rows += session.round_rows
        self._prefix_rows = 0
        if self._opening:
            rows += self._prefill(step)
        self._step, self.in_step, self.rows = step, len(step), rows
        alone, beside = self._alone.ms(rows), self._beside.ms(rows)
        self._busy, self._begun, self._since = True, now, now
        # A step right behind another begins a little later.
        self._left_ms = alone + (self._spec.gap_ms if now == self._ended else 0.0)
        if self._spec.context_ms:
            read = sum(session.prompt_rows + session.at_target for session in step)
            self._left_ms += self._spec.context_ms * self._alone.factor * read / 1e3
        self._slowed = alone / beside if beside else 1.0
        self._speed = self._slowed if self._drafting else 1.0
        self._expect_end()

    def _rounds(self) -> list[VerifiedClient]:
        """The rounds of a step, oldest first, as far as they fit."""
        most = self._spec.max_step_rows
        if not most:
            step, self._ready = [*self._ready.values()], {}
            return step
        step, rows = [], 0
        for session in self._ready.values():
            rows += session.round_rows
            if step and rows > most:
                break
            step.append(session)
        for session in step:
            del self._ready[session.key]
        return step

    def _prefill(self, step: list[VerifiedClient]) -> int:
        """Rows of prefixes in a step; a session whose prefix ends in it has its first round there, too."""
        opening: list[Any] = [*self._opening.values()]
        ready = [session for session in opening if not session.prefill_left]
        left = [each for each in opening if each.prefill_left]
        shares: Iterable[tuple[Any, int]] = share_chunk(left, self._spec.prefill_chunk, 0)
        used = firsts = 0
        for session, rows in shares:
            used += rows
            session.prefilled_rows += rows
            session.prefill_left -= rows
            # A session that was served comes after those that were not.
            del self._opening[session.key]
            if session.prefill_left:
                self._opening[session.key] = session
            else:
                self.admission.computed(session)
                ready.append(session)
        for session in ready:
            self._opening.pop(session.key, None)
            firsts += session.round_rows
            step.append(session)
        self._prefix_rows = used
        return used + firsts

    def _expect_end(self) -> None:
        self._timer += 1
        self._agenda.at(self._agenda.now + max(0.0, self._left_ms) / self._speed, self._end, self._timer)

    def _end(self, timer: int) -> None:
        if timer != self._timer:
            return  # the step has been slowed or sped up since, or its target has failed
        now = self._agenda.now
        step, took_ms = self._step, now - self._begun
        self._busy = False
        self._ended = now
        self.steps += 1
        self.rows_computed += self.rows
        self.busy_ms += took_ms
        self._state(step, took_ms)
        self._batcher.note_step(took_ms / 1e3, self._prefix_rows)
        held, gone = self.admission.held, False
        for session in step:
            if session.key not in held:
                continue
            if session.answered(self._begun, took_ms, len(step), self.rows):
                session.ready_at = now
                self._ready[session.key] = session
            elif session.at_target < session.tokens:
                self._batcher.note_answer(session.key, now / 1e3)
            else:
                self._batcher.forget(session.key)
                self.admission.leave(session)
                gone = True
        if gone or self.admission.waiting:
            self._admit()
        else:
            self._try_start()

    def _state(self, step: list[VerifiedClient], took_ms: float) -> None:
        if any(session.drafting for session in step):
            self.stated_beside.took(took_ms, self._beside.ms(self.rows) / self._beside.factor)
        else:
            self.stated_alone.took(took_ms, self._alone.ms(self.rows) / self._alone.factor)
