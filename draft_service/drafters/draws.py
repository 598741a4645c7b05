"""What a drafter draws after a token: the tokens that it proposes, and its guesses at the target's own token.

Coupled acceptance: draft and target race the same noise, so one ranking serves for both; a node's
children are the best of it (`exactness` §1a). Greedy: the noise is absent and the ranking is that
of the plain scores.

Rejection and block acceptance: the proposed token is drawn from exactly the float32 values that are
sent, with the key of the round that will carry it. The draft's noise is its own: it can't know what
the target draws, so q in order of size, without the proposed token, is its guess at the bonus and at
the token after a rejection (`exactness` §1b).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.shadow import Standing
from paceline.engine.interface import Logits, RankedTokens, Ranking
from paceline.protocol.proposal import Acceptance, SparseDistribution
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling.distribution import (
    LEAST_SHARED_TEMPERATURE,
    divided_scores,
    processed_scores,
    sparse_support,
    support_scores,
)
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race, race_rows, require_finite
from paceline.sampling.ranking import largest_of_rows, shares

_TINY = float(np.finfo(np.float32).tiny)


class NextToken(NamedTuple):
    """A token that may come next, and its q; under greedy decoding q is the plain softmax, as a confidence."""

    token: int
    q: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is kept of one row of logits: the best of its race, and the support that tokens are drawn from."""

    ranked: tuple[NextToken, ...] = ()
    support: SparseDistribution | None = None


class Draws(Protocol):
    """A session's draws. Positions are absolute indices of the token drawn; a round key is a base length."""

    pre_drawn: bool
    """Whether what is proposed was drawn with the key of its round, and no choice may look at it."""

    def read(self, logits: Logits, positions: Sequence[int], count: int) -> Sequence[Distribution]:
        """Keep what rows of logits [n, V] say of the tokens at `positions`, `count` ranks of each."""

    def ranking_of(self, positions: tuple[int, ...], count: int) -> Ranking | None:
        """What an engine may rank in place of `read`; the next tokens are at `positions`. None: nothing."""

    def proposed(self, distribution: Distribution, width: int, position: int, round_key: int) -> Sequence[NextToken]:
        """The children that a node gets in the round of that key, best first; at most `width`."""

    def ranking(self, distribution: Distribution, proposed: Sequence[int], count: int) -> Sequence[NextToken]:
        """Guesses at the target's own token where `proposed` ones are verified, best first; `count` of them or more,
        if there are as many."""

    def standing(self, distribution: Distribution, token: int) -> Standing:
        """How a committed token stands in the drafter's own order: in the race that target and draft share, else by q
        alone. What was drawn to be proposed has no say (`exactness` §7)."""


@dataclass(frozen=True)
class CoupledDraws:
    """Draws with noise by position alone."""

    sampling: SamplingParams
    noise: NoiseKey
    pre_drawn = False

    def read(self, logits: Logits, positions: Sequence[int], count: int) -> Sequence[Distribution]:  # noqa: D102
        if self.sampling.greedy:
            return _best_of(logits, count)
        scores, divisor = divided_scores(logits, self.sampling)
        ids = race_rows(scores, count, self.noise, Stream.DRAFT, positions, divisor=divisor)
        return _with_q(scores, ids, divisor)

    def ranking_of(self, positions: tuple[int, ...], count: int) -> Ranking | None:  # noqa: D102
        temperature = self.sampling.temperature
        alone = replace(self.sampling, logprobs=None) == SamplingParams(temperature=temperature)
        if not alone or 0 < temperature < LEAST_SHARED_TEMPERATURE:
            return None
        return Ranking(self.noise, temperature, positions, count)

    def proposed(self, distribution: Distribution, width: int, position: int, round_key: int) -> Sequence[NextToken]:  # noqa: D102
        return distribution.ranked[:width]

    def ranking(self, distribution: Distribution, proposed: Sequence[int], count: int) -> Sequence[NextToken]:  # noqa: D102
        return distribution.ranked

    def standing(self, distribution: Distribution, token: int) -> Standing:  # noqa: D102
        return Standing(_rank(distribution.ranked, token), distribution.ranked[0].q)


@dataclass(frozen=True)
class PreDrawnDraws:
    """Draws with the key of the round that carries them: chains only."""

    sampling: SamplingParams
    noise: NoiseKey
    vocab_size: int
    pre_drawn = True

    def read(self, logits: Logits, positions: Sequence[int], count: int) -> Sequence[Distribution]:  # noqa: D102
        supports = [sparse_support(scores) for scores in processed_scores(logits, self.sampling)]
        if self.sampling.greedy:
            best = _best_of(logits, count)
            return [Distribution(each.ranked, support) for each, support in zip(best, supports, strict=True)]
        return [Distribution((), support) for support in supports]

    def ranking_of(self, positions: tuple[int, ...], count: int) -> Ranking | None:  # noqa: D102
        return None

    def proposed(self, distribution: Distribution, width: int, position: int, round_key: int) -> Sequence[NextToken]:  # noqa: D102
        assert distribution.support is not None, "read above"
        token = race(self._scores(distribution), self.noise, Stream.DRAFT, position, round_key)
        return (NextToken(token, distribution.support.probability(token)),)

    def ranking(self, distribution: Distribution, proposed: Sequence[int], count: int) -> Sequence[NextToken]:  # noqa: D102
        support = distribution.support
        assert support is not None, "read above"
        guesses = distribution.ranked or _largest(support, count + len(proposed))
        q = dict(zip(support.token_ids, support.probabilities, strict=True)) | dict(guesses)
        first = tuple(NextToken(token, q.get(token, _TINY)) for token in proposed)
        return (*first, *(each for each in guesses if each.token not in proposed))

    def standing(self, distribution: Distribution, token: int) -> Standing:  # noqa: D102
        support = distribution.support
        assert support is not None, "read above"
        order = distribution.ranked or _largest(support, len(support.token_ids))
        return Standing(_rank(order, token), support.probability(token))

    def _scores(self, distribution: Distribution) -> NDArray[np.float64]:
        assert distribution.support is not None, "read above"
        return support_scores(distribution.support, self.vocab_size)


def ranked_distribution(ranked: RankedTokens) -> Distribution:
    """The distribution of a row that an engine has ranked."""
    pairs = zip(ranked.token_ids, ranked.probabilities, strict=True)
    return Distribution(tuple(NextToken(token, q) for token, q in pairs))


def draws_of(acceptance: Acceptance, sampling: SamplingParams, noise: NoiseKey, vocab_size: int) -> Draws:
    """The draws of a session."""
    if acceptance is Acceptance.COUPLED:
        return CoupledDraws(sampling, noise)
    return PreDrawnDraws(sampling, noise, vocab_size)


def _rank(order: Sequence[NextToken], token: int) -> int:
    return next((rank for rank, each in enumerate(order, start=1) if each.token == token), 0)


def _largest(support: SparseDistribution, count: int) -> list[NextToken]:
    """The most probable tokens of a support, the lowest id among equals first."""
    tokens = map(NextToken, support.token_ids, support.probabilities)
    return heapq.nsmallest(count, tokens, key=lambda each: -each.q)


def _best_of(logits: Logits, count: int) -> list[Distribution]:
    """The largest logits of each row, the lowest id among equals first, with the plain softmax as q.

    Raises:
        InvalidInput: a row whose largest logit is not finite, or that holds a NaN.
    """
    require_finite("largest logit", logits.max(axis=1))
    return _with_q(logits, largest_of_rows(logits, count))


def _with_q(scores: Logits, token_ids: NDArray[np.intp], divisor: float = 1.0) -> list[Distribution]:
    """Tokens of each row with the row's softmax as q: a confidence, from which nothing is drawn."""
    distributions = []
    for ids, q in zip(token_ids.tolist(), shares(scores, token_ids, divisor).tolist(), strict=True):
        ranked = (NextToken(token, max(value, _TINY)) for token, value in zip(ids, q, strict=True) if token >= 0)
        distributions.append(Distribution(tuple(ranked)))
    return distributions
