"""Trained drafts and exits behind real services: the target's own text, and no start for another target's draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.drafters.layers.stack import load_draft
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster
from tests.training.conftest import draft_folder, exit_folder, target_folder
from tests.training.tiny_target import load_target, save_target

__all__ = ["draft_folder", "exit_folder", "target_folder"]
THREADS: dict[str, object] = {"engine.threads": 1}


@pytest.fixture(scope="module", params=["draft_folder", pytest.param("exit_folder", marks=pytest.mark.full)])
def drafter(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def trained(drafter: Path, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("trained"),
        target_model=str(target_folder),
        drafters=(f"model:{drafter}",),
        target_flags=THREADS,
        draft_flags=THREADS | {"target_model": str(target_folder)},
        coordinator_flags={"draft_timeout_ms": 5000.0},
    ) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_targets_own(trained: Cluster, drafter: Path, target_folder: Path, temperature: float) -> None:
    written: set[int] = set()
    with trained.client() as client:
        accepted = 0
        for seed in range(3):
            plain, drafted = (
                client.generate(
                    GenerateRequest(
                        messages=(ChatMessage("user", "tell me"),),
                        seed=seed,
                        sampling=SamplingParams(temperature=temperature),
                        max_new_tokens=60,
                        speculation=speculation,
                    )
                )
                for speculation in (SpeculationSettings(off=True), SpeculationSettings(num_draft_tokens=4))
            )
            assert drafted.token_ids == plain.token_ids
            accepted += drafted.stats.num_accepted_draft_tokens
            written |= set(drafted.token_ids)
    assert accepted > 0
    known = load_draft(drafter, load_target(target_folder)).vocabulary.d2t.tolist()
    assert temperature == 0 or written - set(known), "what the draft can't propose is written all the same"


@pytest.mark.full
def test_another_targets_draft_does_not_start(draft_folder: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=1)
    folder = tmp_path / "cluster"
    folder.mkdir()
    cluster = Cluster(
        folder,
        target_model=str(other),
        drafters=(f"model:{draft_folder}",),
        target_flags=THREADS,
        draft_flags=THREADS | {"target_model": str(other)},
    )
    with pytest.raises(Exception, match="made for tiny"), cluster:
        pass
