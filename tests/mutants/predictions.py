"""Rounds that propose what a prediction says next, under rejection acceptance, and mutants that believe it.

A proposed token is certain of itself (q = 1), so it is accepted with the target's own probability of it. The
prediction is fixed before anything is drawn; the place in it follows from committed tokens alone.
"""

from __future__ import annotations

from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.target import Round, Verdict
from paceline.sampling.acceptance import Decision
from paceline.sampling.prediction import PredictedText
from tests.mutants.rounds import PROMPT, Unchecked, certain_chain, chain_of

PREDICTION = (3, 0, 1, 2)


class PredictedRounds(Unchecked):
    """The exact algorithm; nobody draws again what the coordinator itself proposes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.predicted = PredictedText(PREDICTION)

    def propose(self, k: int) -> Proposal:
        generated = self.ids[len(PROMPT) :]
        self.predicted.extend(generated[len(self.predicted) :])
        match = self.predicted.match()
        tokens = match.continuation(k) if match is not None else ()
        return certain_chain(tokens)


class PredictedBlocks(PredictedRounds):
    """The same under block acceptance."""

    acceptance = Acceptance.BLOCK


class BelievesThePrediction(PredictedRounds):
    """A predicted token that the target finds possible at all is taken."""

    def decide(self, round_: Round, verdict: Verdict) -> Decision:
        decision = super().decide(round_, verdict)
        if round_.proposal is None or not len(round_.proposal) or decision.accepted:
            return decision
        first = round_.proposal.token_ids[0]
        return Decision(0, (first,), decision.next_token, decision.provenance)


class PredictsByWhatWasDrawn(Unchecked):
    """Reports the predicted token with the draft's own q, though it was not drawn from it."""

    def propose(self, k: int) -> Proposal:
        honest = super().propose(1)
        support = honest.supports[0]
        generated = len(self.ids) - len(PROMPT)
        token = PREDICTION[generated % len(PREDICTION)]
        return chain_of((token,), (support,))
