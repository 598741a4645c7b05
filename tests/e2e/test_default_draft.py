"""The draft that comes with Paceline, behind real services, found by the target's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import DEFAULT_MODEL
from tests.e2e.cluster import Cluster


@pytest.mark.real_model
def test_the_default_models_draft_is_there_and_changes_no_text(tmp_path: Path) -> None:
    threads: dict[str, object] = {"engine.threads": 1}
    request = GenerateRequest(
        messages=(ChatMessage("user", "Name three rivers."),),
        seed=7,
        sampling=SamplingParams(temperature=0.7),
        max_new_tokens=48,
        speculation=SpeculationSettings(drafter="model", num_draft_tokens=3),
    )
    with (
        Cluster(
            tmp_path,
            target_model=DEFAULT_MODEL,
            drafters=("model:default",),
            target_flags=threads,
            draft_flags=threads | {"target_model": DEFAULT_MODEL},
            coordinator_flags={"draft_timeout_ms": 5000.0},
        ) as running,
        running.client() as client,
    ):
        drafted = client.generate(request)
        plain = client.generate(replace(request, speculation=SpeculationSettings(off=True)))
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_accepted_draft_tokens > 4
