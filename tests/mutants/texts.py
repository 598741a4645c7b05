"""Rounds that propose a text that was kept, of an earlier request of the same prompt and seed, under rejection rules.

A coupled request's text comes from draws that no accept draw, residual or bonus shares. The text of a request under
rejection acceptance came from those very draws, so what was accepted once would be accepted again.
"""

from __future__ import annotations

from paceline.protocol.proposal import Acceptance, Proposal, SparseDistribution
from paceline.sampling.distribution import processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.mutants.rounds import MIDDLING, PROMPT, SAMPLING, TARGET, Rounds

KEPT_TOKENS = 4


class MiddlingRounds(Rounds):
    """The exact algorithm with a draft of which enough is accepted."""

    draft = MIDDLING


class KeptCoupledText(Rounds):
    """Proposes what the coupled request had, as long as the text is the same."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kept = self.kept_text(seed)

    def kept_text(self, seed: int) -> tuple[int, ...]:
        ids = list(PROMPT)
        for position in range(len(ids), len(ids) + KEPT_TOKENS):
            scores = processed_scores(TARGET.logits(ids)[None], SAMPLING)[0]
            ids.append(race(scores, self.noise, Stream.DRAFT, position, 0))
        return tuple(ids[len(PROMPT) :])

    def propose(self, k: int) -> Proposal:
        generated = tuple(self.ids[len(PROMPT) :])
        follows = self.kept[: len(generated)] == generated
        tokens = self.kept[len(generated) :][:k] if follows else ()
        supports = tuple(SparseDistribution((token,), (1.0,)) for token in tokens)
        return Proposal(1, tokens, (1.0,) * len(tokens), supports=supports)


class KeptCoupledTextForBlocks(KeptCoupledText):
    """The same under block acceptance."""

    acceptance = Acceptance.BLOCK


class KeptTextOfTheSameDraws(KeptCoupledText):
    """Proposes what a request under rejection acceptance had."""

    def kept_text(self, seed: int) -> tuple[int, ...]:
        return MiddlingRounds(seed).text(KEPT_TOKENS)
