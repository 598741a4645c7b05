"""Measured acceptance against the formulas: Σ min(p, q), and the coupled one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.engine.table.engine import TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.sampling.distribution import probabilities, processed_scores, sparse_support, support_scores
from tests.e2e.cluster import NEAR, TARGET, Cluster
from tests.sampling import plain

ROUNDS = 500
REQUESTS = 5
SIGMAS = 5.0
"""A right implementation strays so far once in a million; the seeds are fixed."""

Row = NDArray[np.float64]


def overlap(p: Row, q: Row) -> float:
    """Rejection: Σ min(p, q)."""
    return float(np.minimum(p, q).sum())


def row(model: str, history: tuple[int, ...], *, sparse: bool) -> Row:
    scores = processed_scores(TableModel(TableSpec.parse(model)).logits(history)[np.newaxis], SamplingParams())[0]
    if sparse:
        scores = support_scores(sparse_support(scores), scores.shape[0])
    return probabilities(scores)


@pytest.mark.parametrize(
    ("acceptance", "formula"),
    [
        # `test_sampling` has the distribution that this overlap follows from.
        pytest.param(Acceptance.REJECTION, overlap, marks=pytest.mark.full),
        (Acceptance.COUPLED, plain.coupled_match),
    ],
)
async def test_acceptance_is_what_the_formula_says(
    cluster: Cluster, acceptance: Acceptance, formula: Callable[[Row, Row], float]
) -> None:
    """k = 1: every round's first token is a Bernoulli draw whose mean the tables give."""
    speculation = SpeculationSettings(drafter="model", num_draft_tokens=1)
    request = partial(GenerateRequest, max_new_tokens=200, acceptance=acceptance, speculation=speculation)
    async with cluster.async_client() as client:
        generations = await asyncio.gather(
            *(client.generate(request(token_ids=(place, 3), seed=1000 + place)) for place in range(REQUESTS))
        )
    expected = variance = 0.0
    accepted = rounds = 0
    for generation in generations:
        ids = generation.prompt_token_ids + generation.token_ids
        for record in generation.stats.records:
            if not record.proposed:
                continue
            history = ids[: record.base_length + 1]
            sparse = acceptance is not Acceptance.COUPLED
            chance = formula(row(TARGET, history, sparse=False), row(NEAR, history, sparse=sparse))
            expected += chance
            variance += chance * (1 - chance)
            accepted += record.accepted
            rounds += 1
    assert rounds >= ROUNDS
    assert abs(accepted - expected) < SIGMAS * math.sqrt(variance)
    assert sum(g.provenance.count(Provenance.ACCEPTED) for g in generations) == accepted
