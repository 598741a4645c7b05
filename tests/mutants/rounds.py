"""Whole requests, round by round, on the project's own draws and rules, with a seam at each step.

`Rounds` is the exact algorithm over table models: what the draft service, the
target service and the coordinator compute, without processes between them. A
mutant overrides one seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paceline.engine.table.engine import TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.proposal import ROOT, Acceptance, Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.target import Round, Verdict
from paceline.sampling import acceptance
from paceline.sampling.acceptance import Decision
from paceline.sampling.distribution import probabilities, processed_scores, sparse_support, support_scores
from paceline.sampling.drafted import draft_key, redraw
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.sampling import plain

VOCAB = 4
DISTRIBUTION = f"table:vocab={VOCAB},seed=3,contexts=101,sharpness=1.2"
TARGET = TableModel(TableSpec.parse(DISTRIBUTION))
OPPOSITE = TableModel(TableSpec.parse(f"{DISTRIBUTION},invert=1"))
"""A draft that ranks tokens the opposite way: one that resembles the target would hide a bias."""
MIDDLING = TableModel(
    TableSpec.parse(f"table:vocab={VOCAB},seed=3,contexts=101,sharpness=1.2,noise=0.7,noise_seed=5")
)
"""A draft of which enough is accepted that rounds end in the middle of proposals."""
PROMPT = (1, 0, 2)
SAMPLING = SamplingParams()

Scores = NDArray[np.float32]


@cache
def plain_scores(model: TableModel, history: tuple[int, ...]) -> Scores:
    """[V], shared by all requests: not to be written to."""
    scores: Scores = processed_scores(model.logits(history)[np.newaxis], SAMPLING)[0]
    scores.flags.writeable = False
    return scores


@cache
def support_of(scores: bytes) -> tuple[SparseDistribution, NDArray[np.float64]]:
    """The support of a row of scores, and that support's own row."""
    support = sparse_support(np.frombuffer(scores, np.float32))
    return support, support_scores(support, VOCAB)


@cache
def chain_of(token_ids: tuple[int, ...], supports: tuple[SparseDistribution, ...]) -> Proposal:
    """A chain whose tokens come from these supports."""
    q = tuple(support.probability(token) for token, support in zip(token_ids, supports, strict=True))
    return Proposal(1, token_ids, q, supports=supports)


@cache
def certain_chain(token_ids: tuple[int, ...]) -> Proposal:
    """A chain whose tokens are certain of themselves."""
    return chain_of(token_ids, tuple(SparseDistribution((token,), (1.0,)) for token in token_ids))


@cache
def rows_behind(history: tuple[int, ...], token_ids: tuple[int, ...]) -> Scores:
    """[k + 1, V], the target's along a chain; shared as well."""
    rows = np.stack([plain_scores(TARGET, (*history, *token_ids[:depth])) for depth in range(len(token_ids) + 1)])
    rows.flags.writeable = False
    return rows


@dataclass(frozen=True)
class Drawn:
    """A drafted token, its q, and where it was drawn from."""

    token_id: int
    support: SparseDistribution


class Rounds:
    """The exact algorithm."""

    acceptance = Acceptance.REJECTION
    k = 2
    draft = OPPOSITE

    def __init__(self, seed: int) -> None:
        self.noise = NoiseKey(seed)
        self.draft_noise = draft_key(self.noise, self.acceptance)
        self.ids = list(PROMPT)
        self.last_proposal: Proposal | None = None
        self.last_decision: Decision | None = None

    def text(self, length: int) -> tuple[int, ...]:
        """Run rounds until `length` tokens are committed."""
        while len(self.ids) < len(PROMPT) + length:
            proposal = self.receive(self.propose(self.choose_k()))
            round_ = Round(1, len(self.ids) - 1, ROOT, (self.ids[-1],), proposal)
            decision = self.decide(round_, self.verify(round_))
            self.ids += decision.committed
            self.last_proposal, self.last_decision = proposal, decision
        return tuple(self.ids[len(PROMPT) : len(PROMPT) + length])

    # Seams, in the order of a round.

    def choose_k(self) -> int:
        return self.k

    def round_key(self) -> int:
        """The noise of rejection and block carries the round's base length."""
        return len(self.ids) - 1

    def draft_scores(self, history: Sequence[int]) -> Scores:
        return plain_scores(self.draft, tuple(history))

    def draw(self, scores: Scores, position: int) -> Drawn:
        support, supported = support_of(scores.tobytes())
        token = race(supported, self.draft_noise, Stream.DRAFT, position, self.round_key())
        return Drawn(token, support)

    def propose(self, k: int) -> Proposal:
        drawn: list[Drawn] = []
        for _ in range(k):
            history = [*self.ids, *(each.token_id for each in drawn)]
            drawn.append(self.draw(self.draft_scores(history), len(history)))
        return self.pack(drawn)

    def pack(self, drawn: Sequence[Drawn]) -> Proposal:
        return chain_of(tuple(each.token_id for each in drawn), tuple(each.support for each in drawn))

    def receive(self, proposal: Proposal) -> Proposal:
        """What a round carries of what the draft sent: its tokens, drawn again from the q that came with them."""
        drawn = enumerate(zip(proposal.supports, proposal.token_ids, strict=True), start=len(self.ids))
        key = self.round_key()
        found = tuple(redraw(*each, self.draft_noise, position, key) for position, each in drawn)
        if found == proposal.token_ids:
            return proposal
        return self.pack([Drawn(*each) for each in zip(found, proposal.supports, strict=True)])

    def target_scores(self, round_: Round) -> Scores:
        """[k + 1, V]."""
        return rows_behind(tuple(self.ids), round_.proposal.token_ids if round_.proposal else ())

    def verify(self, round_: Round) -> Verdict:
        scores = self.target_scores(round_)
        if self.acceptance is Acceptance.BLOCK:
            p, masses, tokens = acceptance.draw_block(scores, round_, self.noise)
            return Verdict(1, round_.base_length, tokens, p, masses)
        p, tokens = acceptance.draw_rejection(scores, round_, self.noise)
        return Verdict(1, round_.base_length, tokens, p)

    def decide(self, round_: Round, verdict: Verdict) -> Decision:
        return acceptance.decide(self.acceptance, round_, verdict, self.noise)


class Unchecked(Rounds):
    """Takes a draft at its word: the same texts, where the draft is as it should be."""

    def receive(self, proposal: Proposal) -> Proposal:
        return proposal


class BlockRounds(Rounds):
    """The exact algorithm with block acceptance."""

    acceptance = Acceptance.BLOCK


def enumerate_distribution(length: int) -> dict[tuple[int, ...], float]:
    """The distribution of plain sampling."""
    return plain.texts(lambda text: probabilities(plain_scores(TARGET, (*PROMPT, *text))).tolist(), length)
