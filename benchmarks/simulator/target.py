"""The simulated target: continuous batching, leases and prefetched proposals, with the service's own `Batcher`.

A step has the ready rounds of all sessions and a chunk of the prefixes of those that open. While a draft that shares
its cores works, a step goes on at `alone ÷ beside` of its speed.
"""

from __future__ import annotations

from typing import Protocol

from benchmarks.simulator.events import Agenda
from benchmarks.simulator.lines import StatedLine, TrueLine
from benchmarks.simulator.trace import TracedSetting
from target_service.batching import Batcher, BatchingWindow


class VerifiedClient(Protocol):
    """A session as its target sees it."""

    key: int
    tokens: int
    at_target: int
    prefill_left: int
    round_rows: int
    ready_at: float
    drafting: bool

    def answered(self, begun: float, step_ms: float, sessions: int, rows: int) -> bool:
        """A step with its round is done; says whether it goes on by itself."""


class SimulatedTarget:
    """Serves all ready rounds in one step."""

    def __init__(self, agenda: Agenda, setting: TracedSetting, lie: float = 1.0) -> None:
        self._agenda = agenda
        self._setting = setting
        beside = setting.beside if setting.shares_cores else setting.alone
        self._alone, self._beside = TrueLine(setting.alone), TrueLine(beside)
        self.stated_alone, self.stated_beside = StatedLine(setting.alone, lie), StatedLine(beside, lie)
        self._batcher = Batcher()
        self._waiting: list[VerifiedClient] = []
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
        self.sessions = self.in_step = self.rows = self.steps = 0
        self.busy_ms = 0.0

    @property
    def queue(self) -> int:
        """Sessions and rounds that wait."""
        return len(self._waiting) + len(self._opening) + len(self._ready)

    def slower(self, factor: float) -> None:
        """From now on steps take so many times as long."""
        self._alone.factor = self._beside.factor = factor

    def open(self, session: VerifiedClient) -> None:
        """A session comes with its prompt and first round; one beyond the limit waits until another has ended."""
        if self.sessions >= self._setting.max_sessions:
            self._waiting.append(session)
            return
        self.sessions += 1
        self._opening[session.key] = session
        self._try_start()

    def submit(self, session: VerifiedClient) -> None:
        """A round has come."""
        now = self._agenda.now
        self._batcher.back(session.key, now / 1e3)
        session.ready_at = now
        self._ready[session.key] = session
        self._try_start()

    def draft_works(self, works: bool) -> None:
        """A draft on the same cores has begun or ended a step."""
        self._drafting = works
        if not self._busy or self._slowed == 1:
            return
        now = self._agenda.now
        self._left_ms -= (now - self._since) * self._speed
        self._since, self._speed = now, self._slowed if works else 1.0
        self._expect_end()

    def _try_start(self) -> None:
        served = len(self._ready) + len(self._opening)
        if self._busy or not served:
            return
        batcher, now = self._batcher, self._agenda.now / 1e3
        if self._window is None:
            left = sum(session.prefill_left for session in self._opening.values())
            self._window = batcher.window(served, now, min(left, self._setting.prefill_chunk))
            if self._window.awaited and self._window.until > now:
                self._timer += 1
                self._agenda.at(self._window.until * 1e3, self._window_over, self._timer)
        if batcher.is_away(self._window.awaited) and now < self._window.until:
            return
        self._start()

    def _window_over(self, timer: int) -> None:
        if timer == self._timer and not self._busy and self._window is not None:
            self._start()

    def _start(self) -> None:
        self._window = None
        now = self._agenda.now
        step = [*self._ready.values()]
        self._ready.clear()
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
        self._left_ms = alone + (self._setting.gap_ms if now == self._ended else 0.0)
        self._slowed = alone / beside if beside else 1.0
        self._speed = self._slowed if self._drafting else 1.0
        self._expect_end()

    def _prefill(self, step: list[VerifiedClient]) -> int:
        """Rows of prefixes in a step; a session whose prefix ends in it has its first round there, too."""
        chunk, used, firsts = self._setting.prefill_chunk, 0, 0
        for session in [*self._opening.values()]:
            rows = min(session.prefill_left, chunk - used)
            if rows <= 0 and session.prefill_left:
                break
            used += rows
            session.prefill_left -= rows
            if not session.prefill_left:
                del self._opening[session.key]
                firsts += session.round_rows
                step.append(session)
        self._prefix_rows = used
        return used + firsts

    def _expect_end(self) -> None:
        self._timer += 1
        self._agenda.at(self._agenda.now + max(0.0, self._left_ms) / self._speed, self._end, self._timer)

    def _end(self, timer: int) -> None:
        if timer != self._timer:
            return  # the step has been slowed or sped up since
        now = self._agenda.now
        step, took_ms = self._step, now - self._begun
        self._busy = False
        self._ended = now
        self.steps += 1
        self.busy_ms += took_ms
        self._state(step, took_ms)
        self._batcher.stepped(took_ms / 1e3, self._prefix_rows)
        for session in step:
            if session.answered(self._begun, took_ms, len(step), self.rows):
                session.ready_at = now
                self._ready[session.key] = session
            elif session.at_target < session.tokens:
                self._batcher.answered(session.key, now / 1e3)
            else:
                self._gone(session)
        self._try_start()

    def _state(self, step: list[VerifiedClient], took_ms: float) -> None:
        if any(session.drafting for session in step):
            self.stated_beside.took(took_ms, self._beside.ms(self.rows) / self._beside.factor)
        else:
            self.stated_alone.took(took_ms, self._alone.ms(self.rows) / self._alone.factor)

    def _gone(self, session: VerifiedClient) -> None:
        self._batcher.gone(session.key)
        self.sessions -= 1
        if self._waiting:
            self.open(self._waiting.pop(0))
