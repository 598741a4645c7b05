"""Drafts that don't do as they say, before a coordinator that redraws their tokens, and before others.

`exactness` §1d: what a draft can bend under rejection and block acceptance, and what it can't.
"""

from __future__ import annotations

import numpy as np

from paceline.protocol.proposal import Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey
from paceline.sampling.acceptance import EMPTY
from paceline.sampling.distribution import probabilities
from paceline.sampling.noise import Stream, uniform
from tests.mutants.rounds import (
    TARGET,
    VOCAB,
    BlockRounds,
    Drawn,
    Rounds,
    Scores,
    Unchecked,
    plain_scores,
    support_of,
)
from tests.sampling.field import exponentials

SHARPER = 2.5


class MisreportsQ(Rounds):
    """The draft draws from a sharper q than it reports; the coordinator draws again."""

    def draw(self, scores: Scores, position: int) -> Drawn:
        drawn = super().draw((SHARPER * scores).astype(np.float32), position)
        return Drawn(drawn.token_id, support_of(scores.tobytes())[0])


class MisreportsQToBlock(MisreportsQ, BlockRounds):
    """The same under block acceptance."""

    k = 3


class MisreportsQUnchecked(MisreportsQ, Unchecked):
    """The same before a coordinator that takes it at its word."""


class DropsWhatDisagrees(MisreportsQ):
    """The coordinator drops a proposal with a token that its q doesn't give, instead of verifying the right one."""

    def receive(self, proposal: Proposal) -> Proposal:
        return proposal if super().receive(proposal).token_ids == proposal.token_ids else EMPTY


class _Peeks(Unchecked):
    """k depends on the accept draw and on the noise of the recovered token, as far as the draft can compute them."""

    @property
    def peeked(self) -> NoiseKey:
        """What it computes them from."""
        return self.draft_noise

    def choose_k(self) -> int:
        position, round_key = len(self.ids), self.round_key()
        refused = uniform(self.peeked, Stream.ACCEPT, position, round_key) > 0.5
        recovered = int(exponentials(self.peeked, Stream.RESIDUAL, position, VOCAB, round_key).argmin())
        return self.k if refused and recovered < VOCAB // 2 else 0


class PeeksWithItsKey(_Peeks):
    """All that the draft has is its own key."""


class PeeksWithTheSeed(_Peeks):
    """The draft was told the request's seed."""

    @property
    def peeked(self) -> NoiseKey:
        return self.noise


class FitsQToItsNoise(Rounds):
    """The draft looks at its own noise, picks a token that the target thinks possible, and reports a q that gives it.

    No redraw can tell: the token is what q and noise give. q is what the target gives the token, so it is accepted.
    """

    k = 1

    def propose(self, k: int) -> Proposal:
        p = probabilities(plain_scores(TARGET, tuple(self.ids)))
        noise = exponentials(self.draft_noise, Stream.DRAFT, len(self.ids), VOCAB, self.round_key())
        for wanted in range(VOCAB):
            others = noise.astype(np.float64) * (np.arange(VOCAB) != wanted)
            share = 0.999 * float(p[wanted])
            q = (1 - share) * others / others.sum()
            if share / noise[wanted] > (1 - share) / others.sum():
                q[wanted] = share
                return self.pack([Drawn(wanted, SparseDistribution(tuple(range(VOCAB)), tuple(map(float, q))))])
        return super().propose(k)
