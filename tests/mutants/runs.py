"""A session of the target under a lease, driven as the scheduler drives it over a table model, and mutants of it.

The exact one draws the text of rounds that are sent one by one, to the token.
A mutant overrides one seam.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np

from paceline.engine.table.engine import TableEngine, TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.proposal import ROOT, Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round, Verdict
from target_service.session import Session, make_processors, rows_to_reserve
from target_service.verifier import verify

VOCAB = 6
END = VOCAB - 1
SPEC = TableSpec(vocab=VOCAB, seed=3, max_length=256, eos=END)
MODEL = TableModel(SPEC)
INFO = TableEngine(SPEC).info
PROMPT = (1, 0, 2)
LENGTH = 10
SAMPLING = SamplingParams(
    repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.9, min_tokens=3, logit_bias=((END, -2.0),)
)


class DrivenSession:
    """A session of the target, and its processors."""

    def __init__(self, acceptance: Acceptance, seed: int, kind: type[Session] = Session) -> None:
        self.facts = SessionSpec(
            token_ids=PROMPT,
            prompt_length=len(PROMPT),
            sampling=SAMPLING,
            noise=NoiseKey(seed),
            acceptance=acceptance,
            max_length=len(PROMPT) + LENGTH,
            end_token_ids=(END,),
        )
        rows = rows_to_reserve(self.facts, INFO)
        self.session = kind(1, 1, mock.Mock(), self.facts, rows, arrived_at=0.0, prefilled_rows=len(PROMPT) - 1)
        self.processors = make_processors(self.facts, None)
        self.ids = list(PROMPT)


class Runs(DrivenSession):
    """The exact algorithm."""

    def text(self, lease: int) -> tuple[int, ...]:
        """Send rounds that lease so many, until the text ends."""
        while self.ids[-1] != END and len(self.ids) < self.facts.max_length:
            self.leased = Round(1, len(self.ids) - 1, ROOT, (self.ids[-1],), lease=lease)
            self.session.accept(self.leased, INFO, 0.0)
            while self.session.pending is not None:
                verdict = self.answer(self.session.pending.round_)
                self.ids += verdict.token_ids
        return tuple(self.ids[len(PROMPT) :])

    def answer(self, round_: Round) -> Verdict:
        """A step, and what follows from its verdict."""
        assert self.processors is not None
        self.processors.advance(self.committed(round_))
        verdict = verify(MODEL.logits(self.ids)[np.newaxis], self.facts, self.drawn_as(round_), self.processors)
        self.session.remember(round_, replace(verdict, base_length=round_.base_length), INFO)
        self.session.start_next(INFO, 0.0)
        return verdict

    # Seams.

    def committed(self, round_: Round) -> tuple[int, ...]:
        """What the processors have not seen of the tokens before the round's draw."""
        return self.session.newly_committed(round_)

    def drawn_as(self, round_: Round) -> Round:
        """The round whose base length and position key the draw."""
        return round_


class KeyedByItsLease(Runs):
    """Every draw of a run carries the round key of the round that was sent."""

    def drawn_as(self, round_: Round) -> Round:
        base_length = self.leased.base_length
        return replace(round_, base_length=base_length, committed=(0,) * (round_.first_position - base_length))


class AtItsLeasesPosition(Runs):
    """The position does not move on in a run."""

    def drawn_as(self, round_: Round) -> Round:
        return replace(round_, base_length=self.leased.base_length)


class ProcessorsDontSeeTheRun(Runs):
    """Penalties count what the coordinator sent, and none of the run's own tokens."""

    def committed(self, round_: Round) -> tuple[int, ...]:
        sent = round_.base_length == self.leased.base_length
        return super().committed(round_) if sent else ()


class RunsOnBehindTheEnd(Runs):
    """An end token is a token as any other."""

    def __init__(self, acceptance: Acceptance, seed: int) -> None:
        super().__init__(acceptance, seed)
        self.session.facts = replace(self.facts, end_token_ids=())


class RunsOnBeyondItsLength(Runs):
    """A run ends where its lease does, and nowhere else."""

    def __init__(self, acceptance: Acceptance, seed: int) -> None:
        super().__init__(acceptance, seed)
        self.session.facts = replace(self.facts, max_length=0)
