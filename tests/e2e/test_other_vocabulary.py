"""A draft model of another tokenizer behind real services: the text is the target's own, under every rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster, cluster_fixture, full
from tests.e2e.test_distribution import TARGET, check_text

BYTES = "table:vocab=300,seed=9,contexts=101,sharpness=1.0"
"""A draft that has the target's three letters among its bytes, with ids of its own."""
NO_LETTERS = "table:vocab=257,eos=97"
"""One that lacks the first of them."""


in_bytes = cluster_fixture(TARGET, BYTES, NO_LETTERS, draft_flags={"target_model": TARGET})


@pytest.fixture(autouse=True, scope="module")
def _honest(in_bytes: Cluster) -> Iterator[None]:
    yield
    assert "mistake" not in in_bytes.processes["coordinator"].log_tail(1_000_000), "of an honest draft"


@pytest.mark.parametrize(
    ("acceptance", "drafter"),
    [
        (Acceptance.REJECTION, "model"),
        full(Acceptance.REJECTION, f"model:{NO_LETTERS}"),
        full(Acceptance.BLOCK, "model"),
        full(Acceptance.COUPLED, "model"),
    ],
)
async def test_text_has_the_targets_distribution(in_bytes: Cluster, acceptance: Acceptance, drafter: str) -> None:
    await check_text(in_bytes, acceptance, drafter, samples=400)


def test_coupled_text_is_target_onlys(in_bytes: Cluster) -> None:
    accepted = 0
    with in_bytes.client() as client:
        for seed in range(4):
            asked = GenerateRequest(
                prompt="abcabba", seed=seed, sampling=SamplingParams(temperature=1.0), max_new_tokens=48
            )
            plain = client.generate(replace(asked, speculation=SpeculationSettings(off=True)))
            drafted = client.generate(
                replace(asked, speculation=SpeculationSettings(drafter="model", num_draft_tokens=4))
            )
            assert drafted.token_ids == plain.token_ids
            accepted += drafted.stats.num_accepted_draft_tokens
    assert accepted > 10, "its rows are read in the target's ids"
