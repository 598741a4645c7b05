"""`model:mtp`: the multi-token prediction of the target's own checkpoint as a drafter of the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from draft_service.drafters.catalogue import build_catalogue
from draft_service.drafters.model import ModelDrafter
from paceline.engine.features import FeatureEngine
from paceline.protocol.errors import InvalidInput
from paceline.protocol.features import FINAL
from paceline.runtime.config import DraftConfig, EngineSettings
from tests.drafters.heads.tiny_mtp import HIDDEN, OWN_LAYERS, change, save_target

SETTINGS = EngineSettings(threads=1, device="cpu")


def test_the_targets_own_prediction_drafts_and_says_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelDrafter, "measure", lambda drafter: None)  # seconds, of no use here
    target = save_target(tmp_path, "glm4_moe")
    catalogue = build_catalogue(DraftConfig(drafters=("model:mtp",), target_model=str(target), engine=SETTINGS))
    (engine,) = catalogue.engines
    assert isinstance(engine, FeatureEngine)
    assert engine.need.layers == (FINAL,)
    assert engine.feature_width == HIDDEN
    assert catalogue.fingerprint.model == f"{tmp_path.name}#mtp"
    assert catalogue.kv_rows == 0


def test_it_needs_a_target_and_one_that_carries_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="target_model = None: must be given: model:mtp"):
        build_catalogue(DraftConfig(drafters=("model:mtp",), engine=SETTINGS))
    target = save_target(tmp_path, "glm4_moe")
    change(target, lambda name: not name.startswith(f"model.layers.{OWN_LAYERS}."))
    with pytest.raises(InvalidInput, match="with the 1 layers of multi-token prediction that its config"):
        build_catalogue(DraftConfig(drafters=("model:mtp",), target_model=str(target), engine=SETTINGS))
