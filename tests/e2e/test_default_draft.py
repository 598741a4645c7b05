"""The draft of paceline-drafts, behind real services, found by the target's name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import DEFAULT_MODEL
from tests.e2e.cluster import Cluster

REQUEST = GenerateRequest(
    messages=(ChatMessage("user", "Name three rivers."),),
    seed=7,
    sampling=SamplingParams(temperature=0.7),
    max_new_tokens=32,
    speculation=SpeculationSettings(drafter="model", num_draft_tokens=3),
)


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    threads: dict[str, object] = {"engine.threads": 1}
    with Cluster(
        tmp_path_factory.mktemp("default"),
        target_model=DEFAULT_MODEL,
        drafters=("model:default",),
        target_flags=threads,
        draft_flags=threads | {"target_model": DEFAULT_MODEL},
        coordinator_flags={"draft_timeout_ms": 5000.0},
    ) as running:
        yield running


@pytest.mark.real_model
def test_the_default_models_draft_is_there_and_changes_no_text(default: Cluster) -> None:
    with default.client() as client:
        drafted = client.generate(REQUEST)
        plain = client.generate(replace(REQUEST, speculation=SpeculationSettings(off=True)))
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_accepted_draft_tokens > 2


@pytest.mark.real_model
@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
def test_what_it_draws_from_int8_weights_is_drawn_again(default: Cluster, acceptance: Acceptance) -> None:
    samplings = (SamplingParams(1.5), SamplingParams(0.8, top_k=20, top_p=0.9))
    with default.client() as client:
        for sampling in samplings:
            drafted = client.generate(replace(REQUEST, sampling=sampling, acceptance=acceptance))
            assert drafted.stats.num_draft_tokens > 20
    assert "mistake" not in default.processes["coordinator"].log_tail(1_000_000)
