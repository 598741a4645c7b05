"""Rounds that propose a text that was kept, of an earlier request of the same prompt and seed, under rejection rules.

A coupled request's text comes from draws that no accept draw, residual or bonus shares. The text of a request under
rejection acceptance came from those very draws, so what was accepted once would be accepted again.
"""

from __future__ import annotations

from paceline.protocol.proposal import Acceptance, Proposal
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.mutants.rounds import MIDDLING, PROMPT, TARGET, Unchecked, certain_chain, plain_scores

KEPT_TOKENS = 4


class MiddlingRounds(Unchecked):
    """The exact algorithm with a draft of which enough is accepted."""

    draft = MIDDLING


class KeptCoupledText(Unchecked):
    """Proposes what the coupled request had, as long as the text is the same."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kept = self.kept_text(seed)

    def kept_text(self, seed: int) -> tuple[int, ...]:
        ids = list(PROMPT)
        for position in range(len(ids), len(ids) + KEPT_TOKENS):
            ids.append(race(plain_scores(TARGET, tuple(ids)), self.noise, Stream.DRAFT, position, 0))
        return tuple(ids[len(PROMPT) :])

    def propose(self, k: int) -> Proposal:
        generated = tuple(self.ids[len(PROMPT) :])
        follows = self.kept[: len(generated)] == generated
        tokens = self.kept[len(generated) :][:k] if follows else ()
        return certain_chain(tokens)


class KeptCoupledTextForBlocks(KeptCoupledText):
    """The same under block acceptance."""

    acceptance = Acceptance.BLOCK


class KeptTextOfTheSameDraws(KeptCoupledText):
    """Proposes what a request under rejection acceptance had."""

    def kept_text(self, seed: int) -> tuple[int, ...]:
        return MiddlingRounds(seed).text(KEPT_TOKENS)
