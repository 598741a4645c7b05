"""Processed distributions: what the target samples from, and the q that drafters send.

The chain is temperature, top-k, top-p, min-p, in transformers' order, on scores (log-weights):
a filtered id has score -inf, the others keep logit / T, so racing a row draws from its softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.protocol.errors import require
from paceline.protocol.proposal import MAX_SUPPORT_ENTRIES, SparseDistribution
from paceline.protocol.sampling import SamplingParams
from paceline.protocol.target import RowLogprobs
from paceline.sampling.racing import Scores, require_finite

SUPPORT_MASS = 0.995
"""Mass of q that is sent, entries permitting; chosen, not tuned. Exactness does not depend on it."""
PARTIAL_SELECTION = 1024
"""Ids of the largest scores that top-p looks at before it sorts a whole row; chosen, not tuned."""

LEAST_SHARED_TEMPERATURE = 1e-6
"""Below it logit / T may overflow, and then the whole row is needed.

docs/decisions/2026-11-22-rows-are-ranked-in-one-call.md.
"""


def processed_scores(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float32]:
    """Log-weights of the processed distribution for each row.

    Args:
        logits: [rows, V]; -inf excludes an id. Not modified.
        params: the chain.

    Returns:
        [rows, V] float32, a new array: logit / T (minus the row's largest logit where the quotient
        would overflow), -inf for filtered ids. Greedy: 0 at the largest logit, the lowest id among
        equals, and -inf elsewhere.

    Raises:
        InvalidInput: a row whose largest logit is not finite, or that holds a NaN.
    """
    if params.greedy:
        return _point_masses(logits)
    largest = logits.max(axis=1, keepdims=True)
    require_finite("largest logit", largest)
    scores = _apply_temperature(logits, largest, params.temperature)
    if params.top_k and params.top_k < scores.shape[1]:
        _apply_top_k(scores, params.top_k)
    if params.top_p < 1:
        for row in scores:
            _apply_top_p(row, params.top_p)
    if params.min_p > 0:
        _apply_min_p(scores, params.min_p)
    return scores


def divided_scores(logits: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.float32], float]:
    """Log-weights [rows, V] and their divisor, which a race may take in place of `processed_scores`.

    Where temperature alone shapes the distribution these are the logits themselves, so that a race reads them once.

    Raises:
        InvalidInput: as `processed_scores`, where that is called.
    """
    alone = not params.top_k and params.top_p >= 1 and params.min_p <= 0
    if alone and params.temperature >= LEAST_SHARED_TEMPERATURE:
        return logits, params.temperature
    return processed_scores(logits, params), 1.0


def greedy_tokens(logits: NDArray[np.float32]) -> tuple[int, ...]:
    """The id of the largest logit of each row [rows, V], the lowest among equals: what greedy decoding draws.

    Raises:
        InvalidInput: a row whose largest logit is not finite, or that holds a NaN.
    """
    ids = logits.argmax(axis=1)  # of a NaN, if there is one
    require_finite("largest logit", logits[np.arange(len(logits)), ids])
    return tuple(ids.tolist())


def probabilities(scores: Scores) -> NDArray[np.float64]:
    """Softmax of one row's log-weights in float64. Returns [V]; sums to 1."""
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    return np.asarray(weights / weights.sum(), np.float64)


def log_softmax(scores: Scores) -> NDArray[np.float64]:
    """Natural logarithms of a row's softmax in float64. Returns [V]."""
    relative = scores.astype(np.float64) - float(scores.max())
    return np.asarray(relative - math.log(np.exp(relative).sum()), np.float64)


def ratios_to(largest: NDArray[np.float32], scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """Probabilities of log-weights [n, m] over those of the rows' largest ones [n, 1]. Returns [n, m]."""
    return np.asarray(np.exp((scores - largest).astype(np.float64)), np.float64)


def sparse_support(
    scores: Scores, max_entries: int = MAX_SUPPORT_ENTRIES, mass: float = SUPPORT_MASS
) -> SparseDistribution:
    """q for rejection and block acceptance: truncated, renormalised, rounded to float32, in that order.

    Keeps the most probable ids (the lowest among equals) until they hold `mass`, at most
    `max_entries`. The token must then be drawn from exactly these values: race `support_scores`.
    """
    require(1 <= max_entries <= MAX_SUPPORT_ENTRIES, "max_entries", max_entries, f"in [1, {MAX_SUPPORT_ENTRIES}]")
    full = probabilities(scores)
    ids = _largest_first(full, max_entries)[:max_entries]
    ids = ids[: 1 + int(np.searchsorted(np.cumsum(full[ids]), mass))]
    ids = np.sort(ids)
    q = (full[ids] / full[ids].sum()).astype(np.float32)
    ids, q = ids[q > 0], q[q > 0]
    return SparseDistribution(tuple(ids.tolist()), tuple(q.tolist()))


def support_scores(support: SparseDistribution, vocab_size: int) -> NDArray[np.float64]:
    """log q of a support, -inf outside: racing these draws from exactly the values sent. Returns [V]."""
    require(support.token_ids[-1] < vocab_size, "support token id", support.token_ids[-1], f"below {vocab_size}")
    scores = np.full(vocab_size, -np.inf)
    scores[list(support.token_ids)] = np.log(np.asarray(support.probabilities, np.float64))
    return scores


def row_logprobs(logits: Scores, wanted_ids: Sequence[int], top: int) -> RowLogprobs:
    """Log-probabilities of the unprocessed distribution after one row.

    Args:
        logits: [V].
        wanted_ids: the ids that may be emitted here; they come first, in order.
        top: how many of the most probable ids to add, largest first.

    Returns:
        Every id once: an id that is both wanted and probable stands among the wanted.
    """
    logprobs = log_softmax(logits)
    best = _largest_first(logprobs, top)[:top].tolist() if top else []
    ids = tuple(dict.fromkeys([*wanted_ids, *best]))
    return RowLogprobs(ids, tuple(logprobs[list(ids)].tolist()))


def token_logprobs(logits: Scores, token_id: int, top: int) -> RowLogprobs:
    """Log-probabilities of the unprocessed distribution [V]: of one token, then of the `top` most probable ones.

    The most probable come largest first, the lowest id first among equals; the token may be among them.
    """
    logprobs = log_softmax(logits)
    best = _largest_first(logits, top)[:top].tolist() if top else []
    ids = (token_id, *best)
    return RowLogprobs(ids, tuple(logprobs[list(ids)].tolist()))


def _point_masses(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    scores = np.full(logits.shape, -np.inf, np.float32)
    scores[np.arange(len(logits)), list(greedy_tokens(logits))] = 0
    return scores


def _apply_temperature(
    logits: NDArray[np.float32], largest: NDArray[np.float32], temperature: float
) -> NDArray[np.float32]:
    # A divisor that float32 rounds to 0 would give 0 / 0 at the largest logit.
    divisor = np.maximum(np.float32(temperature), np.finfo(np.float32).tiny)
    with np.errstate(over="ignore"):
        fits = bool(np.isfinite(largest / divisor).all())
        return np.asarray((logits if fits else logits - largest) / divisor, np.float32)


def _apply_top_k(scores: NDArray[np.float32], k: int) -> None:
    """Drop ids below the k-th largest; equals of the k-th stay, as in transformers."""
    smallest_kept = np.partition(scores, -k, axis=1)[:, -k, None]
    scores[scores < smallest_kept] = -np.inf


def _apply_top_p(row: NDArray[np.float32], top_p: float) -> None:
    """Keep the smallest set, largest first, whose mass reaches `top_p`; the lowest ids among equals."""
    alive = np.flatnonzero(row > -np.inf)
    mass = probabilities(row[alive])
    order = _largest_first(row[alive], PARTIAL_SELECTION)
    cumulative = np.cumsum(mass[order])
    if cumulative[-1] < top_p and order.size < alive.size:
        order = _largest_first(row[alive], alive.size)
        cumulative = np.cumsum(mass[order])
    kept_ids = alive[order[: 1 + int(np.searchsorted(cumulative, top_p))]]
    values = row[kept_ids]
    row.fill(-np.inf)
    row[kept_ids] = values


def _apply_min_p(scores: NDArray[np.float32], min_p: float) -> None:
    """Drop ids less probable than `min_p` times the most probable one."""
    scores[ratios_to(scores.max(axis=1, keepdims=True), scores) < min_p] = -np.inf


def _largest_first(values: Scores, count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest values and all equals of the last, largest first, then by id."""
    if count >= values.size:
        return np.argsort(-values, kind="stable")
    smallest = np.partition(values, -count)[-count]
    ids = np.flatnonzero(values >= smallest)
    return ids[np.argsort(-values[ids], kind="stable")]
