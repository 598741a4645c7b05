"""Penalties, bias, bad words, min tokens, grammars and samples through the three real services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.engine.table.engine import TableModel
from paceline.local.service_process import Flags
from paceline.models.table_names import TableSpec
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.e2e.cluster import Cluster, cluster_fixture, full
from tests.e2e.statistics import LEVEL, Tokens, chi_square_p
from tests.e2e.streams import output_of
from tests.e2e.test_distribution import sample
from tests.sampling import plain

VOCAB = 5
END = 4
TARGET = f"table:vocab={VOCAB},seed=5,contexts=101,sharpness=1.0,eos={END}"
OPPOSITE = TARGET + ",invert=1"
MODEL = TableModel(TableSpec.parse(TARGET))
PROMPT: Tokens = (0, 2, 1)
LENGTH = 6
SAMPLES = 150
ENDINGS = ("", "b", "d")
GRAMMAR = Grammar(GrammarKind.REGEX, "(ab?|cd)+")
PENALISED = SamplingParams(
    temperature=0.9,
    repetition_penalty=0.4,
    presence_penalty=1.5,
    frequency_penalty=1.5,
    logit_bias=((1, 0.7), (END, 1.0)),
    bad_words=((1, 3), (0, 0), (2, 1, 1)),
    min_tokens=2,
)
"""So different that few samples tell which of it is left out."""
CONSTRAINED = SamplingParams(temperature=1.2, frequency_penalty=0.5, grammar=GRAMMAR)
TARGET_ONLY = SpeculationSettings(off=True)
CHAIN = SpeculationSettings(drafter="model", num_draft_tokens=3)
SPECULATIONS = (
    CHAIN,
    SpeculationSettings(drafter="model", num_draft_tokens=4, tree_widths=(3, 2)),
    SpeculationSettings(drafter="ngram", num_draft_tokens=4),
    SpeculationSettings(),
)
request = partial(GenerateRequest, token_ids=PROMPT, max_new_tokens=LENGTH)
services = cluster_fixture(TARGET, OPPOSITE)
processed = pytest.mark.parametrize("params", [PENALISED, CONSTRAINED], ids=["penalised", "constrained"])


def enumerate_distribution(params: SamplingParams) -> dict[Tokens, float]:
    """The chance of every text, from the definitions: no code of the package's chain."""

    def row(text: Tokens) -> Sequence[float]:
        return plain.processed_row(MODEL.logits((*PROMPT, *text)).tolist(), PROMPT, text, params, END, ENDINGS)

    return plain.texts(row, LENGTH, END)


@pytest.mark.parametrize(
    ("acceptance", "params"),
    [
        (Acceptance.REJECTION, PENALISED),
        (Acceptance.BLOCK, CONSTRAINED),
        full(Acceptance.REJECTION, CONSTRAINED),
        full(Acceptance.BLOCK, PENALISED),
    ],
)
async def test_text_has_the_processed_distribution(
    services: Cluster, acceptance: Acceptance, params: SamplingParams
) -> None:
    drafted = partial(request, sampling=params, acceptance=acceptance, speculation=CHAIN)
    async with services.async_client() as client:
        sampled = await sample(client, drafted, SAMPLES, fewest_rounds=1)
    assert chi_square_p(sampled, enumerate_distribution(params)) > LEVEL


@pytest.mark.parametrize(
    "without",
    [
        {"repetition_penalty": 1.0},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0.0},
        {"logit_bias": ()},
        {"bad_words": ()},
        {"min_tokens": 0},
    ],
    ids=lambda without: next(iter(without)),
)
def test_the_statistic_sees_what_is_left_out(without: dict[str, Any]) -> None:
    """The mutation of the test itself."""
    wrong = enumerate_distribution(replace(PENALISED, **without))
    cells = sorted(wrong)
    masses = np.array([wrong[cell] for cell in cells])
    drawn = np.random.default_rng(0).choice(len(cells), size=SAMPLES, p=masses / masses.sum())
    assert chi_square_p([cells[i] for i in drawn], enumerate_distribution(PENALISED)) < LEVEL


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@processed
async def test_any_speculation_writes_the_target_only_text(
    services: Cluster, params: SamplingParams, temperature: float
) -> None:
    long = partial(request, sampling=replace(params, temperature=temperature, logprobs=2), max_new_tokens=40)
    async with services.async_client() as client:
        for seed in range(2):
            plain = await client.generate(long(seed=seed, speculation=TARGET_ONLY))
            for speculation in SPECULATIONS:
                drafted = await client.generate(long(seed=seed, speculation=speculation))
                assert output_of(drafted) == output_of(plain)
            assert_unprocessed(plain.token_ids, [row.logprobs[0] for row in plain.logprobs])


def assert_unprocessed(output: Tokens, logprobs: Sequence[float]) -> None:
    for i, (token, logprob) in enumerate(zip(output, logprobs, strict=True)):
        row = MODEL.logits((*PROMPT, *output[:i])).astype(np.float64)
        assert logprob == pytest.approx(float(row[token] - np.log(np.exp(row).sum())), abs=1e-5)


async def test_a_perfect_draft_is_accepted_whole_under_any_chain(tmp_path: Path) -> None:
    """The target's own model as its draft: every token is accepted only if the draft's chain is the target's."""
    request_of = partial(GenerateRequest, token_ids=PROMPT, seed=3)
    waiting: Flags = {"fan_out": 0}  # a round that waits for its proposal gets it whole
    with Cluster(tmp_path, TARGET, (f"model:{TARGET}",), coordinator_flags=waiting) as same:
        async with same.async_client() as client:
            for acceptance in Acceptance:
                four = SpeculationSettings(drafter="model", num_draft_tokens=4)
                whole = request_of(max_new_tokens=50, ignore_eos=True, acceptance=acceptance, speculation=four)
                plain = await client.generate(whole)
                assert plain.stats.rounds == plain.stats.acceptance_histogram[4] == 10
                assert plain.stats.mean_acceptance_length == 5
                assert plain.provenance.count(Provenance.BONUS) == 10
                for params in (PENALISED, CONSTRAINED):
                    chain = request_of(max_new_tokens=12, acceptance=acceptance, sampling=params, speculation=CHAIN)
                    stats = (await client.generate(chain)).stats
                    assert stats.num_accepted_draft_tokens >= stats.num_draft_tokens - 3  # cut by the end of the text


async def test_a_reopened_or_resumed_text_goes_on_the_same(services: Cluster) -> None:
    async with services.async_client() as client:
        repeated = SamplingParams(frequency_penalty=0.2, grammar=Grammar(GrammarKind.REGEX, "(ab|cd){9}"))
        for params in (PENALISED, repeated):
            base = request(sampling=params, seed=5, speculation=CHAIN, max_new_tokens=18)
            whole = (await client.generate(base)).token_ids
            for arrived in range(1, len(whole), 2):
                rest = await client.generate(replace(base, resume_token_ids=whole[:arrived]))
                assert whole[:arrived] + rest.token_ids == whole


async def test_samples_share_prompt_and_seed_and_not_their_noise(services: Cluster) -> None:
    base = request(seed=9, speculation=CHAIN, max_new_tokens=12)
    async with services.async_client() as client:
        samples = await client.generate_samples(4, base)
        assert samples[0].token_ids == (await client.generate(base)).token_ids
        third = await client.generate(replace(base, sample_index=2))
        unseeded = await client.generate_samples(3, GenerateRequest(token_ids=PROMPT, max_new_tokens=12))
        with pytest.raises(InvalidInput, match="n = 0"):
            await client.generate_samples(0, base)
    assert third.token_ids == samples[2].token_ids
    assert [each.sample_index for each in samples] == [0, 1, 2, 3]
    assert len({each.token_ids for each in samples}) > 1
    assert len({each.seed for each in unseeded}) == 1
    with services.client() as sync:
        assert [each.token_ids for each in sync.generate_samples(4, base)] == [each.token_ids for each in samples]


@pytest.mark.parametrize("params", [full(PENALISED), CONSTRAINED])
async def test_samples_of_one_seed_have_the_distribution_too(services: Cluster, params: SamplingParams) -> None:
    drafted = partial(request, sampling=params, seed=77, speculation=CHAIN)
    async with services.async_client() as client:
        sampled = await sample(client, lambda seed: drafted(sample_index=seed), SAMPLES, fewest_rounds=1)
    assert chi_square_p(sampled, enumerate_distribution(params)) > LEVEL


async def test_what_cannot_be_served_is_refused_by_name(services: Cluster) -> None:
    """By the target, at the start and in the midst of a text; `tests/grammars/test_workers.py` has every case."""
    wrong = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(a"))
    stuck = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a"), bad_words=((0,),))
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"sampling": wrong}, "regex = '(a': must be a grammar"),
        (
            {"sampling": SamplingParams(grammar=GRAMMAR), "resume_token_ids": (1, 3)},
            "token at position 3 = 1: must be a token that the regex allows there",
        ),
        ({"sampling": stuck}, "tokens left at position 3 = 0: must be at least 1: bad_words, min_tokens and grammar"),
    ]
    async with services.async_client() as client:
        for changes, text in refusals:
            with pytest.raises(InvalidInput) as caught:
                await client.generate(request(seed=1, **changes))
            assert text in caught.value.message
            assert len((await client.generate(request(max_new_tokens=2, ignore_eos=True))).token_ids) == 2
    services.wait_idle()
