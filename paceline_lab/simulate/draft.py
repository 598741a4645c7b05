"""The simulated draft service: all sessions advance together, a level a step, as `draft_service` does it.

A session waits for a proposal, or prepares for the outcomes of its round, or rests. A step computes the rows of
tokens that were committed since, one row of each proposal that is waited for, and fills up with outcomes.
Where trees are asked for, nodes beside the best path cost no row: none of them is drafted behind.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import Protocol

from draft_service.drafters.calibration import Calibration
from draft_service.drafters.model import ROWS_PER_STEP
from paceline_lab.simulate.events import Agenda
from paceline_lab.simulate.lines import StatedLine, TrueLine
from paceline_lab.simulate.specs import DraftSpec
from paceline_lab.simulate.speculating import DraftedBefore, OutcomeDrafting

Works = Callable[[bool], None]


class DraftingClient(Protocol):
    """A session as its draft sees it."""

    key: int
    prompt_tokens: int
    tokens: int
    ranks: tuple[int, ...]
    chances: tuple[float, ...]

    def proposal_leaves(self, base: int, tokens: int, draft_ms: float) -> None:
        """A proposal behind so many committed tokens is sent."""

    def shadow_leaves(self, first: int, end: int) -> None:
        """Where these committed positions stood is said."""

    def draft_lost(self) -> None:
        """The draft service has failed."""


class DraftedSession:
    """What the draft service has of one session. Positions count the tokens of the answer.

    Attributes:
        committed: tokens that it was told of.
        rows: tokens of the true text whose rows are computed; drafted ones that will come true count.
        prompt_left: rows of the prompt to compute.
        told: positions whose shadow has left.
        wanted, least, got, reached: a proposal in the making: its length, the least chance of a node of it, its
            tokens so far, and the chance of the last one.
        kept: what was drafted behind the last committed token before it was known.
        shadow: the rows of committed tokens are to be computed in any case.
    """

    __slots__ = (
        "committed", "got", "kept", "least", "outcomes", "prompt_left", "reached", "rows", "session", "shadow",
        "started", "told", "turn", "wanted",
    )  # fmt: skip

    def __init__(self, session: DraftingClient, prompt_tokens: int) -> None:
        self.session = session
        self.prompt_left = prompt_tokens
        self.committed = self.rows = self.told = 0
        self.wanted = self.got = 0
        self.least, self.reached = 0.0, 1.0
        self.shadow = False
        self.started = 0.0
        self.turn = 0
        """Counts commits and rounds: what a step began for an earlier one is not for this one."""
        self.outcomes: OutcomeDrafting | None = None
        self.kept: DraftedBefore | None = None

    @property
    def lag(self) -> int:
        """Rows of prompt and committed tokens that are not computed."""
        return self.prompt_left + max(0, self.committed - self.rows)

    @property
    def context(self) -> int:
        """Tokens whose keys and values a step with a row of it reads."""
        return self.session.prompt_tokens - self.prompt_left + self.committed


class SimulatedDraft:
    """Serves the drafts of all sessions, one level a step."""

    def __init__(self, agenda: Agenda, spec: DraftSpec, works: Works, lie: float = 1.0) -> None:
        self._agenda = agenda
        self._works = works
        self._chunk = spec.prefill_chunk
        self._line = TrueLine(spec.line)
        self._known = spec.line
        self._context_ms, self._gap_ms = spec.context_ms, spec.gap_ms
        self.stated = StatedLine(spec.line, lie)
        self._calibration = Calibration()
        self._held: dict[int, DraftedSession] = {}
        self._drafts: dict[int, DraftedSession] = {}
        self._shadows: dict[int, DraftedSession] = {}
        self._speculations: dict[int, DraftedSession] = {}
        self._step: list[tuple[DraftedSession, int, int]] = []
        self._guesses: list[tuple[DraftedSession, OutcomeDrafting]] = []
        self._deferred: dict[int, list[Callable[[], None]]] = {}
        """By session, what came while a step ran."""
        self._busy = False
        self._begun, self._caught_up = 0.0, False
        self._lives = 0
        """Counts failures: a step that was running when it failed has no end."""
        self.is_up = True
        self.in_step = self.rows = self.steps = 0
        self.busy_ms = 0.0

    @property
    def queue(self) -> int:
        """Proposals that are waited for."""
        return len(self._drafts)

    @property
    def load(self) -> int:
        """Sessions here."""
        return len(self._held)

    def slower(self, factor: float) -> None:
        """From now on steps take so many times as long."""
        self._line.factor = factor

    def open(self, session: DraftingClient, *, computes: bool) -> DraftedSession:
        """A session comes; what it wants comes with its first commit. Its prompt may be computed before."""
        held = self._held[session.key] = DraftedSession(session, session.prompt_tokens)
        if computes:
            self._shadows[session.key] = held
            self._try_start()
        return held

    def commit(self, held: DraftedSession, committed: int, wanted: int, least: float, shadow: bool) -> None:
        """So many tokens are committed; a proposal of `wanted` tokens is waited for, 0: none.

        It is taken in between steps: what a running step computes for the outcome that came true is kept.
        """
        news = partial(self._take_commit, held, committed, wanted, least, shadow, self._agenda.now)
        self._take(held, news, late=held.outcomes is not None)

    def _take_commit(
        self, held: DraftedSession, committed: int, wanted: int, least: float, shadow: bool, came: float
    ) -> None:
        key = held.session.key
        if self._held.get(key) is not held:
            return  # it has ended, or was sent before its coordinator knew that the service has failed
        self._drafts.pop(key, None)
        self._speculations.pop(key, None)
        held.kept, outcomes = None, held.outcomes
        if outcomes is not None:
            held.rows = max(held.rows, outcomes.true_rows(held.session.ranks))
            held.kept = outcomes.kept if outcomes.comes_to(committed) else None
        held.turn += 1
        held.committed, held.shadow, held.outcomes = committed, shadow, None
        held.wanted, held.least, held.got, held.reached = wanted, least, 0, 1.0
        held.started = came
        if wanted:
            self._drafts[key] = held
        if shadow and held.lag:
            self._shadows[key] = held
        else:
            self._shadows.pop(key, None)
        self._tell(held)
        if wanted and not held.lag:
            self._take_first(held)

    def verifying(self, held: DraftedSession, outcomes: OutcomeDrafting) -> None:
        """A round has left with what the session has been told of: prepare for its outcomes."""
        self._take(held, partial(self._take_round, held, outcomes), late=False)

    def _take(self, held: DraftedSession, news: Callable[[], None], *, late: bool) -> None:
        """Take news in: at the end of the step, if it has rows that they decide about, and all that comes behind."""
        key = held.session.key
        if self._busy and (late or key in self._deferred):
            self._deferred.setdefault(key, []).append(news)
        else:
            news()
            self._try_start()

    def _take_round(self, held: DraftedSession, outcomes: OutcomeDrafting) -> None:
        key = held.session.key
        if self._held.get(key) is not held or held.committed != outcomes.base:
            return
        self._drafts.pop(key, None)
        held.turn += 1
        held.wanted, held.outcomes = 0, outcomes
        outcomes.begin(held.kept, self._agenda.now)
        self._speculations[key] = held

    def chance(self, best: float, rank: int) -> float:
        """Chance of a rank, as the service has learned it."""
        return self._calibration.chance(best, rank)

    def close(self, held: DraftedSession) -> None:
        """The session has ended."""
        for work in (self._held, self._drafts, self._shadows, self._speculations):
            work.pop(held.session.key, None)

    def fail(self) -> None:
        """It ends, and with it all that it holds."""
        self.is_up = self._busy = False
        self._lives += 1
        lost = [*self._held.values()]
        for work in (self._held, self._drafts, self._shadows, self._speculations):
            work.clear()
        self._step, self._guesses, self._deferred = [], [], {}
        self._works(False)
        for held in lost:
            held.session.draft_lost()

    def _try_start(self) -> None:
        if self._busy:
            return
        rows = self._gather()
        if not rows:
            return
        self._busy, self._begun, self.rows = True, self._agenda.now, rows
        self._works(True)
        took_ms = self._line.ms(rows) + self._context_ms * self._line.factor * self._read() / 1e3 + self._gap_ms
        self._agenda.at(self._begun + took_ms, self._end, self._lives)

    def _gather(self) -> int:
        """What a step computes: lags and waited-for levels of everyone, then the most probable nodes of outcomes."""
        step, guesses, rows, chunk = [], [], 0, self._chunk
        for held in self._work().values():
            lag = held.lag
            taken = min(lag, chunk) if held.prompt_left else lag
            chunk -= taken if held.prompt_left else 0
            level = 1 if not lag and held.got < held.wanted else 0
            if taken or level:
                step.append((held, taken, held.turn))
                rows += taken + level
            if held.outcomes is not None and not lag and held.outcomes.best:
                guesses.append((held, held.outcomes))
        self._caught_up = any(taken for _, taken, _ in step)
        self._step = step
        self._guesses = guesses
        self.in_step = len(step)
        return self._fill([guess for _, guess in guesses], rows) if guesses else rows

    def _read(self) -> int:
        """Tokens whose keys and values the step reads: each session's that has a row in it, once."""
        waited_for = sum(held.context for held, _, _ in self._step)
        return waited_for + sum(held.context for held, guess in self._guesses if guess.has_taken)

    def _work(self) -> dict[int, DraftedSession]:
        if not self._shadows and not self._speculations:
            return self._drafts
        return {**self._shadows, **self._drafts, **self._speculations}

    def _fill(self, guesses: list[OutcomeDrafting], rows: int) -> int:
        """Add the most probable nodes while a row gains more a millisecond than the step has; a step is bounded."""
        order = [(-guess.best, place) for place, guess in enumerate(guesses)]
        heapq.heapify(order)
        gained = float(rows)
        line = self._known
        per_row = line.per_row(max(1, rows), ROWS_PER_STEP)
        fixed = line.ms(1) - per_row
        while rows < ROWS_PER_STEP:
            chance, place = -order[0][0], order[0][1]
            if not chance or (rows and chance * (fixed + per_row * rows) < gained * per_row):
                break
            guesses[place].take()
            rows, gained = rows + 1, gained + chance
            heapq.heapreplace(order, (-guesses[place].best, place))
        return rows

    def _end(self, life: int) -> None:
        if life != self._lives:
            return
        now = self._agenda.now
        took_ms = now - self._begun
        self._busy = False
        self.steps += 1
        self.busy_ms += took_ms
        if not self._caught_up:
            self.stated.took(took_ms - self._gap_ms, self._line.ms(self.rows) / self._line.factor)
        step, guesses = self._step, self._guesses
        self._step, self._guesses = [], []
        for held, taken, turn in step:
            self._advance(held, taken, turn)
        for _, guess in guesses:
            guess.absorb(now)
        deferred, self._deferred = self._deferred, {}
        for news in itertools.chain.from_iterable(deferred.values()):
            news()
        for key in [key for key, held in self._speculations.items() if not held.lag and not _has_work(held)]:
            del self._speculations[key]
        self._try_start()
        if not self._busy:
            self._works(False)

    def _advance(self, held: DraftedSession, taken: int, turn: int) -> None:
        """A session's rows of the step are computed; what was committed meanwhile is left for the next."""
        if taken:
            of_prompt = min(taken, held.prompt_left)
            held.prompt_left -= of_prompt
            held.rows += taken - of_prompt
            self._tell(held)
            if held.lag:
                return
            self._shadows.pop(held.session.key, None)
            if held.session.key in self._drafts:
                self._take_first(held)
        elif turn == held.turn and held.session.key in self._drafts:
            position = held.committed + held.got
            if held.rows == position - 1 and held.session.ranks[position - 1] == 1:
                held.rows = position
            self._grow(held, 1)

    def _take_first(self, held: DraftedSession) -> None:
        """The root's row is computed, and with it those of nodes drafted before that hang from it."""
        self._grow(held, max(held.kept.rows if held.kept else 0, 1 + max(0, held.rows - held.committed)))
        held.kept = None

    def _grow(self, held: DraftedSession, more: int) -> None:
        chances, end = held.session.chances, held.session.tokens
        for _ in range(more):
            position = held.committed + held.got
            if held.got >= held.wanted or position >= end:
                break
            held.reached *= self._calibration.chance(chances[position], 1)
            if held.reached < held.least:
                held.wanted = held.got
                break
            held.got += 1
        if held.got >= held.wanted or held.committed + held.got >= end:
            del self._drafts[held.session.key]
            held.wanted = 0
            held.session.proposal_leaves(held.committed, held.got, self._agenda.now - held.started)

    def _tell(self, held: DraftedSession) -> None:
        """Learn from, and tell the shadow of, committed positions before which all rows are computed."""
        if held.prompt_left:
            return
        first, end = held.told, min(held.committed, held.rows + 1)
        if end <= first:
            return
        held.told = end
        ranks, chances = held.session.ranks, held.session.chances
        for position in range(first, end):
            self._calibration.observe(chances[position], ranks[position] or None)
        held.session.shadow_leaves(first, end)


def _has_work(held: DraftedSession) -> bool:
    return held.outcomes is not None and held.outcomes.best > 0
