"""The coupled processor on made-up logits, between vLLM's penalties and its rule for drafts, both restated."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling.distribution import processed_scores
from paceline.sampling.noise import Stream
from paceline.sampling.processors import Processors
from paceline.sampling.racing import race
from tests.services.harness import LAW, SPEC
from tests.vllm.fakes import put_module
from tests.vllm.sampler_rule import commit, penalised

SLOTS = 8
V = SPEC.vocab
CHAINS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.1, "top_k": 5},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.08},
    "top-k and top-p": {"temperature": 1.2, "top_k": 9, "top_p": 0.7},
    "penalties": {
        "temperature": 1.1,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.2,
        "top_p": 0.95,
    },
}
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def asked(**changes: Any) -> Any:
    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    return SimpleNamespace(**(own | PENALTIES | changes))


def config(rule: str = "standard") -> Any:
    return SimpleNamespace(speculative_config=SimpleNamespace(rejection_sample_method=rule))


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class, over a base class in the place of vLLM's."""
    put_module(monkeypatch, "vllm.v1.worker.gpu.sample.logits_processor", LogitsProcessor=object)
    sys.modules.pop("paceline_vllm.coupled", None)
    from paceline_vllm import coupled

    yield coupled.CoupledSampling
    sys.modules.pop("paceline_vllm.coupled", None)


def processor(kind: Any, requests: dict[int, Any], rule: str = "standard") -> Any:
    states = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=SLOTS, vocab_size=V)
    sampler = kind(config(rule), states)
    for slot, request in requests.items():
        assert sampler.add_request(slot, request) is (request.temperature > 0)
    sampler.apply_staged_writes()
    return sampler


def apply(sampler: Any, logits: NDArray[np.float32], slots: Sequence[int], positions: Sequence[int]) -> Any:
    """What the sampler would go on with: rows of slots, whose own tokens stand at these positions."""
    context = SimpleNamespace(
        expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32),
        idx_mapping_np=np.array([*dict.fromkeys(slots)], np.int32),
        pos=torch.tensor(positions, dtype=torch.int64),
    )
    return sampler.apply(torch.from_numpy(logits.copy()), context).numpy()


def texts_of(
    sampler: Any, requests: dict[int, Any], length: int, draws: Any, most_drafted: int = 0, right: Any = None
) -> list[list[int]]:
    """Texts by the table's law, a step for all; drafts are now `right`, now wrong, and rows have penalties."""
    texts = [[slot, 1] for slot in requests]
    while min(map(len, texts)) < length:
        drafts = []
        for slot, text in enumerate(texts):
            own = right[slot][len(text) :] if right else []
            count = draws.integers(0, most_drafted + 1)
            drafts.append([t if draws.random() < 0.7 else int(draws.integers(V)) for t in own[:count]])
        prefixes = [
            (slot, [*texts[slot], *drafted[:count]])
            for slot, drafted in enumerate(drafts)
            for count in range(len(drafted) + 1)
        ]
        logits = [penalised(LAW.logits(p).astype(np.float32), p[:2], p[2:], requests[slot]) for slot, p in prefixes]
        slots = [slot for slot, _ in prefixes]
        rows = apply(sampler, np.stack(logits), slots, [len(prefix) - 1 for _, prefix in prefixes])
        for slot, drafted in enumerate(drafts):
            texts[slot] += commit(rows[np.array(slots) == slot], drafted, draws)
    return [text[:length] for text in texts]


def test_a_seed_is_one_text_with_drafts_and_without(kind: Any) -> None:
    requests = {slot: asked(seed=slot + (1 << 40), **chain) for slot, chain in enumerate(CHAINS.values())}
    sampler, draws, tokens = processor(kind, requests), np.random.default_rng(3), 240
    plain = texts_of(sampler, requests, tokens, draws)
    for most_drafted in (1, 4):
        assert texts_of(sampler, requests, tokens, draws, most_drafted, plain) == plain
    other = {0: asked(seed=9)}
    assert texts_of(processor(kind, other), other, tokens, draws)[0] != plain[0]


def test_ten_thousand_rows_are_drawn_alike_alone_and_among_others(kind: Any) -> None:
    requests = {slot: asked(seed=slot, **chain) for slot, chain in enumerate(CHAINS.values())}
    sampler, draws = processor(kind, requests), np.random.default_rng(1)
    logits = draws.normal(0, 2, (10_000, V)).astype(np.float32)
    slots, positions = draws.integers(0, len(CHAINS), 10_000).tolist(), draws.integers(0, 500, 10_000).tolist()
    together = apply(sampler, logits, slots, positions)
    assert np.array_equal(np.isfinite(together).sum(axis=1), np.ones(10_000))
    assert together.max(axis=1).tolist() == [0.0] * 10_000
    for begin in range(0, 10_000, 500):
        part = slice(begin, begin + 7)
        assert np.array_equal(apply(sampler, logits[part], slots[part], positions[part]), together[part])


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.full if each in ("temperature", "top-p") else ()) for each in CHAINS],
)
def test_a_hundred_thousand_draws_have_the_distribution(kind: Any, name: str) -> None:
    """Chi-square against Paceline's own chain: min_p, top-k and top-p are never combined where the orders differ."""
    chain, count = CHAINS[name], 100_000
    request, prompt, output = asked(seed=77, **chain), [3, 5, 5], [2, 5, 9, 9, 9]
    sampler = processor(kind, {0: request})
    own_logits = np.random.default_rng(5).normal(0, 1.5, V).astype(np.float32)
    logits = penalised(own_logits, prompt, output, request)  # vLLM's penalties come before
    rows = np.concatenate(
        [
            apply(sampler, np.tile(logits, (10_000, 1)), [0] * 10_000, range(begin, begin + 10_000)).argmax(axis=1)
            for begin in range(0, count, 10_000)
        ]
    )
    sampling = SamplingParams(**chain)
    penalties = Processors(sampling, len(prompt))
    penalties.advance([*prompt, *output])
    scores = processed_scores(penalties.process(own_logits[None], [()]), sampling)[0].astype(np.float64)
    p = np.exp(scores - scores.max())
    p /= p.sum()
    seen = np.bincount(rows, minlength=V)
    assert seen[p == 0].sum() == 0
    assert stats.chisquare(seen[p > 0], p[p > 0] * count).pvalue > 1e-3


def test_the_draw_is_the_race_of_seed_and_position(kind: Any) -> None:
    """So a draft that shares the seed picks the same token, and Paceline's own target the same text."""
    sampler = processor(kind, {0: asked(seed=(1 << 63) + 12345, temperature=0.8)})
    draws = np.random.default_rng(2)
    for position in (1, 2, 500):
        logits = draws.normal(0, 2, V).astype(np.float32)
        scores = (logits / np.float32(0.8)).astype(np.float32)
        drawn = race(scores, NoiseKey((1 << 63) + 12345), Stream.DRAFT, position)
        assert apply(sampler, logits[None], [0], [position - 1])[0].argmax() == drawn


def test_what_penalties_exclude_is_never_drawn(kind: Any) -> None:
    """vLLM applies them before; a slot's next request leaves nothing of the one before it."""
    sampler = processor(kind, {0: asked(seed=4, top_k=1)})
    sampler.add_request(0, asked(seed=4))
    sampler.apply_staged_writes()
    logits = np.zeros((2000, V), np.float32)
    logits[:, 3:] = -np.inf
    drawn = apply(sampler, logits, [0] * 2000, range(2000)).argmax(axis=1)
    assert set(drawn.tolist()) == {0, 1, 2}


def test_greedy_requests_are_left_alone(kind: Any) -> None:
    sampler = processor(kind, {0: asked(temperature=0.0), 1: asked(seed=2)})
    logits = np.random.default_rng(2).normal(0, 1, (3, V)).astype(np.float32)
    assert np.array_equal(apply(sampler, logits, [0, 0, 0], [4, 5, 6]), logits)
    mixed = apply(sampler, logits, [0, 1, 0], [4, 5, 6])
    assert np.array_equal(mixed[[0, 2]], logits[[0, 2]])
    assert np.isfinite(mixed[1]).sum() == 1


def test_requests_without_a_seed_differ_and_a_negative_seed_is_one(kind: Any) -> None:
    sampler = processor(kind, {0: asked(seed=None), 1: asked(seed=None), 2: asked(seed=-5), 3: asked(seed=-5)})
    logits = np.zeros((64, V), np.float32)
    texts = [apply(sampler, logits, [slot] * 64, range(64)).argmax(axis=1).tolist() for slot in range(4)]
    assert texts[0] != texts[1]
    assert texts[2] == texts[3]


def test_rules_that_accept_what_is_not_drawn_are_refused(kind: Any) -> None:
    with pytest.raises(InvalidInput, match="rejection_sample_method = 'synthetic'"):
        processor(kind, {}, rule="synthetic")
    processor(kind, {}, rule="block")
