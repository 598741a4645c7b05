"""Variants that break exactness, one for each row of the table in `exactness` §9 that is about drawing.

Each is a way in which an engine was, or could easily be, wrong. `test_mutants`
shows that the distribution of the text gives every one of them away, and that the exact
algorithm passes the same test.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from unittest import mock

import numpy as np

from paceline.protocol.proposal import Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey
from paceline.sampling import acceptance
from paceline.sampling.noise import Stream, uniform
from paceline.sampling.racing import race
from tests.mutants.rounds import MIDDLING, VOCAB, BlockRounds, Drawn, Scores, Unchecked, support_of
from tests.sampling.field import exponentials

WEAK = 0.3
"""q below which a drafted token counts as weak."""


class ResidualReusesDraftNoise(Unchecked):
    """The recovered token is raced with the noise that drew the rejected one."""

    def text(self, length: int) -> tuple[int, ...]:
        def on_draft_stream(scores: Scores, key: NoiseKey, stream: Stream, position: int, round_key: int = 0) -> int:
            return race(scores, self.draft_noise, Stream.DRAFT, position, round_key)

        with mock.patch.object(acceptance, "race", on_draft_stream):
            return super().text(length)


class DraftAndAcceptShareU(Unchecked):
    """The draft draws by inverse CDF from the u that decides its acceptance."""

    def draw(self, scores: Scores, position: int) -> Drawn:
        u = uniform(self.noise, Stream.ACCEPT, position, self.round_key())
        support, _ = support_of(scores.tobytes())
        index = int(np.searchsorted(np.cumsum(support.probabilities), u, side="right"))
        return Drawn(support.token_ids[min(index, len(support.token_ids) - 1)], support)


class OneUForARound(Unchecked):
    """Every position of a round is decided by the first one's u."""

    def text(self, length: int) -> tuple[int, ...]:
        def first_u(key: NoiseKey, stream: Stream, position: int, round_key: int = 0) -> float:
            return uniform(key, stream, len(self.ids), round_key)

        with mock.patch.object(acceptance, "uniform", first_u):
            return super().text(length)


class DraftLooksAtU(Unchecked):
    """k is chosen by the accept draw of the token it would propose."""

    def choose_k(self) -> int:
        return 2 if uniform(self.noise, Stream.ACCEPT, len(self.ids), self.round_key()) < 0.5 else 0


class CoarserQ(Unchecked):
    """q is reported in eighths, drawn in full."""

    def draw(self, scores: Scores, position: int) -> Drawn:
        drawn = super().draw(scores, position)
        return Drawn(drawn.token_id, _coarser(drawn.support))


@cache
def _coarser(support: SparseDistribution) -> SparseDistribution:
    coarse = np.maximum(np.round(8 * np.array(support.probabilities)), 1)
    coarse /= coarse.sum()
    return SparseDistribution(support.token_ids, tuple(map(float, coarse)))


class _PositionOnlyKeys(Unchecked):
    """Draws forget the round that they belong to."""

    def round_key(self) -> int:
        return 0

    def text(self, length: int) -> tuple[int, ...]:
        def race_at(scores: Scores, key: NoiseKey, stream: Stream, position: int, round_key: int = 0) -> int:
            return race(scores, key, stream, position, 0)

        def uniform_at(key: NoiseKey, stream: Stream, position: int, round_key: int = 0) -> float:
            return uniform(key, stream, position, 0)

        with mock.patch.multiple(acceptance, race=race_at, uniform=uniform_at):
            return super().text(length)


class BlockWithPositionOnlyKeys(_PositionOnlyKeys, BlockRounds):
    """Block acceptance whose rejected positions are drawn again with the same noise."""

    k = 3
    draft = MIDDLING


class DiscardedTokenChoosesK(Unchecked):
    """The next k depends on a drafted token that was dropped: exact, since noise carries the round key."""

    def choose_k(self) -> int:
        dropped = self._dropped()
        return self.k if dropped is None else 1 + dropped % 2

    def _dropped(self) -> int | None:
        """The token that was drafted, and dropped, for the position that is drawn next."""
        if self.last_proposal is None or self.last_decision is None:
            return None
        rest = self.last_proposal.token_ids[len(self.last_decision.accepted) + 1 :]
        return rest[0] if rest else None


class DiscardedTokenChoosesKWithPositionOnlyKeys(_PositionOnlyKeys, DiscardedTokenChoosesK):
    """The same with position-only keys."""

    k = 3

    def choose_k(self) -> int:
        dropped = self._dropped()
        return self.k if dropped is None else (0 if dropped < VOCAB // 2 else 3)


class TrunkNoiseChoosesBranchLength(_PositionOnlyKeys):
    """A branch is as long as the noise of the trunk, shared with it, suggests."""

    def choose_k(self) -> int:
        field = exponentials(self.draft_noise, Stream.DRAFT, len(self.ids), VOCAB, self.round_key())
        return 2 if int(field.argmin()) < VOCAB // 2 else 0


class DrafterChosenByItsOwnDraw(Unchecked):
    """Of two drafters, the one that is surer of what it drew."""

    k = 1

    def propose(self, k: int) -> Proposal:
        sharp = self._with(1.0)
        flat = self._with(0.4)
        return max(sharp, flat, key=lambda proposal: proposal.draft_probabilities[0])

    def _with(self, scale: float) -> Proposal:
        scores = (scale * self.draft_scores(self.ids)).astype(np.float32)
        support, supported = support_of(scores.tobytes())
        log_q = supported.astype(np.float32)
        # Drafters draw independently: another stream of positions for the second.
        position = len(self.ids) + (0 if scale == 1.0 else 1 << 20)
        return self.pack([Drawn(race(log_q, self.draft_noise, Stream.DRAFT, position, self.round_key()), support)])


class TrimmedByItsOwnQ(Unchecked):
    """The proposal is cut before its first weak token."""

    def pack(self, drawn: Sequence[Drawn]) -> Proposal:
        strong = []
        for each in drawn:
            if each.support.probability(each.token_id) < WEAK:
                break
            strong.append(each)
        return super().pack(strong)


class KeepThenStop(Unchecked):
    """The exact twin of trimming: a weak token is kept, and nothing is drafted after it."""

    k = 3

    def propose(self, k: int) -> Proposal:
        drawn: list[Drawn] = []
        for _ in range(k):
            history = [*self.ids, *(each.token_id for each in drawn)]
            drawn.append(self.draw(self.draft_scores(history), len(history)))
            if drawn[-1].support.probability(drawn[-1].token_id) < WEAK:
                break
        return self.pack(drawn)
