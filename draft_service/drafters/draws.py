"""A drafter's draws after a token: the tokens that it proposes, and its guesses at the target's own token.

Coupled acceptance: draft and target race the same noise, so one ranking serves for both. A node's
children are the best of it (`exactness` §1a). Greedy decoding has no noise: the ranking is that of
the plain scores.

Rejection and block acceptance: the proposed token is drawn from exactly the float32 values that are
sent, with the key of the round that will carry it. The draft's noise is its own, so it can't know
what the target draws. Its guess at the bonus, and at the token after a rejection, is the order of q
without the proposed token (`exactness` §1b).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    """An extract of one row of logits: the best tokens of its race, and the support that tokens are drawn from."""

    top_tokens: tuple[NextToken, ...] = ()
    support: SparseDistribution | None = None


class Draws(Protocol):
    """A session's draws. Positions are absolute indices of the token drawn; a round key is a base length."""

    pre_drawn: bool
    """Whether proposed tokens are drawn with the key of their round; then no choice may depend on them."""

    def read(self, logits: Logits, positions: Sequence[int], count: int) -> Sequence[Distribution]:
        """Read rows of logits [n, V] for the tokens at `positions`, with `count` ranks of each."""

    def ranking_of(self, positions: tuple[int, ...], count: int) -> Ranking | None:
        """The ranking with which an engine may replace `read` for the tokens at `positions`; None: it may not."""

    def proposed(self, distribution: Distribution, width: int, position: int, round_key: int) -> Sequence[NextToken]:
        """The children of a node in the round of that key, best first; at most `width`."""

    def ranking(self, distribution: Distribution, proposed: Sequence[int], count: int) -> Sequence[NextToken]:
        """Guesses at the target's own token where the `proposed` ones are verified, best first.

        There are `count` or more, if the distribution has as many.
        """

    def standing(self, distribution: Distribution, token: int) -> Standing:
        """The rank of a committed token in the drafter's own order: that of the shared race, or else that of q.

        The draws of proposed tokens have no influence on it (`exactness` §7).
        """


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
        return Ranking(self.noise, self.sampling.temperature, positions, count) if self._may_be_ranked else None

    @cached_property
    def _may_be_ranked(self) -> bool:
        """Whether temperature alone shapes the scores, in float32 as an engine has them."""
        temperature = self.sampling.temperature
        is_plain = replace(self.sampling, logprobs=None) == SamplingParams(temperature=temperature)
        return is_plain and not 0 < temperature < LEAST_SHARED_TEMPERATURE

    def proposed(self, distribution: Distribution, width: int, position: int, round_key: int) -> Sequence[NextToken]:  # noqa: D102
        return distribution.top_tokens[:width]

    def ranking(self, distribution: Distribution, proposed: Sequence[int], count: int) -> Sequence[NextToken]:  # noqa: D102
        return distribution.top_tokens

    def standing(self, distribution: Distribution, token: int) -> Standing:  # noqa: D102
        return Standing(_rank(distribution.top_tokens, token), distribution.top_tokens[0].q)


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
            return [Distribution(each.top_tokens, support) for each, support in zip(best, supports, strict=True)]
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
        guesses = distribution.top_tokens or _largest(support, count + len(proposed))
        q = dict(zip(support.token_ids, support.probabilities, strict=True)) | dict(guesses)
        first = tuple(NextToken(token, q.get(token, _TINY)) for token in proposed)
        return (*first, *(each for each in guesses if each.token not in proposed))

    def standing(self, distribution: Distribution, token: int) -> Standing:  # noqa: D102
        support = distribution.support
        assert support is not None, "read above"
        order = distribution.top_tokens or _largest(support, len(support.token_ids))
        return Standing(_rank(order, token), support.probability(token))

    def _scores(self, distribution: Distribution) -> NDArray[np.float64]:
        assert distribution.support is not None, "read above"
        return support_scores(distribution.support, self.vocab_size)


def ranked_distribution(row: RankedTokens) -> Distribution:
    """The distribution of a row that an engine has ranked."""
    pairs = zip(row.token_ids, row.probabilities, strict=True)
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
        tokens = (NextToken(token, max(value, _TINY)) for token, value in zip(ids, q, strict=True) if token >= 0)
        distributions.append(Distribution(tuple(tokens)))
    return distributions
