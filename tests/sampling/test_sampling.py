"""Processed distributions against transformers' own warpers, and the supports that drafters send."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import SparseDistribution
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling import distribution as sampling
from paceline.sampling.distribution import (
    probabilities,
    processed_scores,
    row_logprobs,
    sparse_support,
    support_scores,
)
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race

Rows = NDArray[np.float32]


def warped(logits: Rows, params: SamplingParams) -> NDArray[np.float64]:
    """transformers' chain: temperature in float32 as it runs there, the sums of the filters in float64."""
    no_history = torch.LongTensor([])
    scores = TemperatureLogitsWarper(params.temperature)(no_history, torch.from_numpy(logits.copy())).double()
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(no_history, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(no_history, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(no_history, scores)
    return np.asarray(scores.numpy(), np.float64)


def random_logits(seed: int, rows: int, vocab_size: int, scale: float = 3.0) -> Rows:
    return (np.random.default_rng(seed).standard_normal((rows, vocab_size)) * scale).astype(np.float32)


CHAINS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=10_000),
    SamplingParams(top_p=0.001),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.95),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.7, top_k=50, top_p=0.9),
    SamplingParams(temperature=0.3, top_k=200, top_p=0.99, min_p=0.02),
    SamplingParams(temperature=2.5, top_p=0.97, min_p=0.001),
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 300, 5000])
def test_chain_keeps_transformers_tokens_and_scores(chain: SamplingParams, vocab_size: int) -> None:
    logits = random_logits(vocab_size, 6, vocab_size)
    before = logits.copy()
    ours, theirs = processed_scores(logits, chain), warped(logits, chain)
    assert ours.dtype == np.float32
    assert np.array_equal(np.isfinite(ours), np.isfinite(theirs))
    assert np.array_equal(ours.astype(np.float64), theirs)
    assert np.array_equal(logits, before)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.05, 20),
    top_k=st.integers(0, 60),
    top_p=st.just(1.0) | st.floats(0.01, 1 - 1e-9),  # nearer to 1 the rounding of a sum decides
    min_p=st.floats(0, 0.9),
)
def test_any_chain_keeps_transformers_tokens(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    chain = SamplingParams(temperature, top_k, top_p, min_p)
    logits = random_logits(seed, 3, 50)
    assert np.array_equal(np.isfinite(processed_scores(logits, chain)), np.isfinite(warped(logits, chain)))


def test_top_k_keeps_the_equals_of_the_last_as_transformers_does() -> None:
    logits = np.array([[3, 1, 2, 2, 2, 0]], np.float32)
    chain = SamplingParams(top_k=2)
    assert np.flatnonzero(np.isfinite(processed_scores(logits, chain))[0]).tolist() == [0, 2, 3, 4]
    assert np.array_equal(processed_scores(logits, chain), warped(logits, chain).astype(np.float32))


def test_top_p_among_equals_keeps_the_lowest_ids() -> None:
    # transformers sorts unstably: how many equals stay is defined, which ones is not.
    logits = np.zeros((1, 4000), np.float32)
    chain = SamplingParams(top_p=0.6)
    kept = np.flatnonzero(np.isfinite(processed_scores(logits, chain))[0])
    assert kept.tolist() == list(range(kept.size))
    assert abs(kept.size - int(np.isfinite(warped(logits, chain)).sum())) <= 1


def test_partial_selection_equals_the_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.concatenate([random_logits(5, 3, 6000, scale) for scale in (0.5, 2, 6)])
    logits = np.round(logits, 1)  # many equals
    for top_p in (0.3, 0.9, 0.999):
        chain = SamplingParams(top_p=top_p)
        partial = processed_scores(logits, chain)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "PARTIAL_SELECTION", 10**9)
            assert np.array_equal(partial, processed_scores(logits, chain))


def test_greedy_is_a_point_mass_on_the_lowest_largest() -> None:
    logits = np.array([[1, 5, 5, 0], [7, -np.inf, 7, 7]], np.float32)
    scores = processed_scores(logits, SamplingParams(temperature=0, top_p=0.5))
    assert scores.tolist() == [[-math.inf, 0, -math.inf, -math.inf], [0, -math.inf, -math.inf, -math.inf]]
    assert race(scores[0], NoiseKey(0), Stream.DRAFT, 3) == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-300])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    logits = np.array([[1000, 990, -1000], [-5, -4, -3]], np.float32)
    scores = processed_scores(logits, SamplingParams(temperature=temperature))
    assert [race(row, NoiseKey(1), Stream.DRAFT, 0) for row in scores] == [0, 2]
    assert probabilities(scores[0]).tolist() == [1, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_cannot_be_sampled_are_refused(bad: float, temperature: float) -> None:
    logits = np.zeros((2, 5), np.float32)
    logits[1] = bad if bad == -math.inf else 0
    logits[1, 3] = bad
    with pytest.raises(InvalidInput, match="largest logit"):
        processed_scores(logits, SamplingParams(temperature=temperature))


def test_probabilities_sum_to_one_and_ignore_shifts() -> None:
    scores = processed_scores(random_logits(2, 1, 50_000), SamplingParams(top_p=0.9))[0]
    p = probabilities(scores)
    assert p.dtype == np.float64
    assert abs(math.fsum(p) - 1) < 1e-12
    assert not p[np.isneginf(scores)].any()
    assert np.abs(probabilities(scores.astype(np.float64) - 1e4) - p).max() < 1e-12


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.integers(1, 600),
    scale=st.sampled_from([0.0, 0.1, 2.0, 30.0, 500.0]),
    max_entries=st.integers(1, 256),
    mass=st.sampled_from([0.3, 0.9, 0.995, 1.0]),
)
def test_supports_are_the_most_probable_ids_renormalised(
    seed: int, vocab_size: int, scale: float, max_entries: int, mass: float
) -> None:
    scores = random_logits(seed, 1, vocab_size, scale)[0]
    support = sparse_support(scores, max_entries, mass)
    p = probabilities(scores)
    assert len(support.token_ids) <= max_entries
    assert abs(math.fsum(support.probabilities) - 1) < 256 * 2**-24
    assert all(np.float32(q) == q for q in support.probabilities)
    ids = list(support.token_ids)
    outside = np.setdiff1d(np.arange(vocab_size), ids)
    assert outside.size == 0 or p[outside].max() <= p[ids].min()
    enough = p[ids].sum() >= mass - 1e-12 or len(ids) == max_entries or p[outside].max(initial=0) < 1e-40
    assert enough
    smallest = np.sort(p[ids])[1:].sum()
    assert len(ids) == 1 or smallest < mass + 1e-12  # without its last entry it would not do
    assert np.allclose(support.probabilities, p[ids] / p[ids].sum(), rtol=1e-6)


def test_support_scores_are_the_sent_values() -> None:
    support = sparse_support(random_logits(3, 1, 500)[0], 20)
    scores = support_scores(support, 500)
    sent = np.zeros(500)
    sent[list(support.token_ids)] = support.probabilities
    assert np.allclose(np.exp(scores), sent, rtol=1e-15, atol=0)
    assert np.flatnonzero(np.isfinite(scores)).tolist() == list(support.token_ids)


def test_support_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidInput, match="support token id = 9"):
        support_scores(SparseDistribution((1, 9), (0.5, 0.5)), 9)


@pytest.mark.parametrize("entries", [0, 257])
def test_support_limit_is_named(entries: int) -> None:
    with pytest.raises(InvalidInput, match="max_entries"):
        sparse_support(np.zeros(5, np.float32), entries)


def test_row_logprobs_lists_wanted_then_most_probable_once_each() -> None:
    logits = np.array([0, 3, 1, 2, 2], np.float32)
    listed = row_logprobs(logits, [4, 0, 4], 3)
    assert listed.token_ids == (4, 0, 1, 3)
    exact = torch.log_softmax(torch.from_numpy(logits).double(), 0)[list(listed.token_ids)].tolist()
    assert listed.logprobs == pytest.approx(exact, abs=1e-12)
    assert row_logprobs(logits, [2], 0).token_ids == (2,)
    assert row_logprobs(logits, [], 99).token_ids == (1, 3, 4, 2, 0)
