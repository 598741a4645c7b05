"""Draws from logits that are spread over ranks by vocabulary id, without gathering them. Pure.

Noise is keyed by global id, so each rank races its own share and rank 0 takes the best of the bests,
ties to the lowest id: the very token that the whole race draws. Rejection and block acceptance need p
itself: one exchange before the race tells every rank the row's largest score and total mass.

1. `summarise` on every rank, exchanged between all     (rejection and block)
2. `draw_part` on every rank, sent to rank 0
3. `combine` on rank 0

A row with NaN or without a finite score is refused in step 3, so that every rank takes every step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.engine.interface import Draw, DrawnTokens, Logits
from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import Acceptance
from paceline.sampling import acceptance
from paceline.sampling.noise import BLOCK, Stream
from paceline.sampling.racing import race_part

Summaries = NDArray[np.float64]
"""[k, 3]: of each proposed token's row the largest score here, Σ exp(score - largest), the token's own
score (-inf if it isn't here)."""

Parts = NDArray[np.float64]
"""[rows, 3]: of each row the best value here, its id, and the mass of the residual here."""

Share = range
"""The ids that one rank has logits for; the first is a multiple of 4."""


def vocabulary_shares(vocab_size: int, ranks: int) -> tuple[Share, ...]:
    """Equal shares in whole blocks of noise; the last ones may be smaller, or empty."""
    width = BLOCK * -(-vocab_size // (BLOCK * ranks))
    firsts = (min(rank * width, vocab_size - vocab_size % BLOCK) for rank in range(ranks))
    return tuple(
        Share(first, min(first + width, vocab_size) if width * rank < vocab_size else first)
        for rank, first in enumerate(firsts)
    )


def summarise(draw: Draw, logits: Logits, share: Share) -> Summaries:
    """A summary of this rank's logits [k + 1, len(share)] for the other ranks; empty for coupled draws."""
    if draw.acceptance is Acceptance.COUPLED:
        return np.empty((0, 3))
    scores = _scores(draw, logits)[:-1].astype(np.float64)
    summaries = np.full((len(scores), 3), -np.inf)
    for row, token, summary in zip(scores, _proposed_ids(draw), summaries, strict=True):
        largest = float(row.max(initial=-np.inf))
        with np.errstate(invalid="ignore"):
            mass = float(np.exp(row - largest).sum()) if np.isfinite(largest) else 0.0
        own = float(row[token - share.start]) if token in share else -np.inf
        summary[:] = largest, mass, own
    return summaries


def draw_part(draw: Draw, logits: Logits, share: Share, summaries: NDArray[np.float64]) -> Parts:
    """Race this rank's share of every row.

    Args:
        draw: how to draw.
        logits: [rows, len(share)].
        share: the ids of the columns.
        summaries: [ranks, k, 3], as every rank summarised its rows.
    """
    scores = _scores(draw, logits)
    if draw.acceptance is Acceptance.COUPLED:
        positions = acceptance.draw_positions(draw.round_)
        return np.array(
            [_coupled_part(draw, row, share, position) for row, position in zip(scores, positions, strict=True)]
        )
    parts = _residual_parts(draw, scores[:-1], share, summaries)
    round_ = draw.round_
    position = round_.first_position + len(parts)
    bonus = race_part(scores[-1], share.start, draw.noise, Stream.DRAFT, position, round_.base_length)
    return np.array([*parts, (*bonus, 0.0)])


def combine(draw: Draw, parts: NDArray[np.float64], summaries: NDArray[np.float64]) -> DrawnTokens:
    """The draws of one round from the parts of all ranks.

    Args:
        draw: how it was drawn.
        parts: [ranks, rows, 3].
        summaries: [ranks, k, 3].

    Raises:
        InvalidInput: a row's largest logit is not finite, or it holds NaN.
    """
    masses = parts[:, :, 2].sum(axis=0)  # [rows]
    tokens = tuple(_winner(parts[:, row, :], float(mass)) for row, mass in enumerate(masses))
    if draw.acceptance is Acceptance.COUPLED:
        return DrawnTokens(tokens)
    p = _token_probabilities(summaries)
    if draw.acceptance is Acceptance.REJECTION:
        return DrawnTokens(tokens, p)
    return DrawnTokens(tokens, p, tuple(masses[:-1].tolist()))


def _scores(draw: Draw, logits: Logits) -> Logits:
    """logit / T as `paceline.sampling.distribution` has it; greedy draws compare logits themselves."""
    if draw.greedy:
        return logits
    with np.errstate(over="ignore"):
        return np.asarray(logits / np.float32(draw.temperature), np.float32)


def _proposed_ids(draw: Draw) -> tuple[int, ...]:
    return draw.round_.proposal.token_ids if draw.round_.proposal else ()


def _coupled_part(draw: Draw, scores: Logits, share: Share, position: int) -> tuple[float, int, float]:
    if not draw.greedy:
        return (*race_part(scores, share.start, draw.noise, Stream.DRAFT, position), 0.0)
    if not len(share):
        return -np.inf, share.start, 0.0
    best = int(scores.argmax())
    return float(scores[best]), share.start + best, 0.0


def _residual_parts(
    draw: Draw, scores: Logits, share: Share, summaries: NDArray[np.float64]
) -> list[tuple[float, int, float]]:
    """For each proposed token this rank's race over [w p - q]+, or over p where that has no mass here."""
    round_ = draw.round_
    proposal = round_.proposal or acceptance.EMPTY
    weights = _weights(draw, summaries)
    largest, total = _normaliser(summaries)
    parts = []
    for i, row in enumerate(scores):
        with np.errstate(invalid="ignore", over="ignore"):
            p = np.exp(row.astype(np.float64) - largest[i]) / total[i]
            q = acceptance.drafted_distribution(proposal, i, draw.vocab_size)[share.start : share.stop]
            leftover = acceptance.residual(p, q, weights[i])
        mass = float(leftover.sum())
        best = race_part(
            acceptance.log_of(leftover if mass > 0 else p),
            share.start,
            draw.noise,
            Stream.RESIDUAL,
            round_.first_position + i,
            round_.base_length,
        )
        parts.append((*best, mass))
    return parts


def _weights(draw: Draw, summaries: NDArray[np.float64]) -> tuple[float, ...]:
    if draw.acceptance is Acceptance.REJECTION:
        return tuple(1.0 for _ in _proposed_ids(draw))
    proposal = draw.round_.proposal or acceptance.EMPTY
    return acceptance.block_weights(_token_probabilities(summaries), acceptance.drafted_probabilities(proposal))


def _normaliser(summaries: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The largest score [k] and Σ exp(score - largest) [k] of whole rows, summed in the order of ranks."""
    largest = summaries[:, :, 0].max(axis=0)
    with np.errstate(invalid="ignore"):
        total = (summaries[:, :, 1] * np.exp(summaries[:, :, 0] - largest)).sum(axis=0)
    return largest, total


def _token_probabilities(summaries: NDArray[np.float64]) -> tuple[float, ...]:
    """p(x_i) of each proposed token."""
    largest, total = _normaliser(summaries)
    with np.errstate(invalid="ignore"):
        p = np.exp(summaries[:, :, 2].max(axis=0) - largest) / total
    token_probabilities: list[float] = p.tolist()
    return tuple(token_probabilities)


def _winner(parts: NDArray[np.float64], mass: float) -> int:
    """The id of one row's best part [ranks, 3]. Where a rank has a residual, those without one don't count.

    Raises:
        InvalidInput: the best value is not finite.
    """
    values = parts[:, 0] if mass == 0 else np.where(parts[:, 2] > 0, parts[:, 0], -np.inf)
    largest = float(values.max())
    if not np.isfinite(largest):
        raise InvalidInput.of("largest logit", largest, "finite")
    return int(parts[values == largest, 1].min())
