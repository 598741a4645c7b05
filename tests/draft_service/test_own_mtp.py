"""`model:mtp`: the multi-token prediction of the target's own checkpoint as a drafter of the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from draft_service.drafters.catalogue import build_catalogue
from draft_service.drafters.model import ModelDrafter
from paceline.engine.features import FeatureEngine
from paceline.protocol.errors import InvalidInput
from paceline.protocol.features import FINAL
from paceline.runtime.config import DraftConfig, EngineSettings
from tests.engine.tiny import random_model
from tests.models.saving import byte_level_tokenizer

HIDDEN = 32
SETTINGS = EngineSettings(threads=1, device="cpu")


def save_target(folder: Path) -> Path:
    """A whole target of two layers, which carries a third for multi-token prediction under `mtp.`."""
    tokenizer = byte_level_tokenizer()
    shape: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 48, "head_dim": 8}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=2, **shape, **heads)
    random_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    first = "model.layers.0."
    layer = {name.removeprefix(first): each for name, each in tensors.items() if name.startswith(first)}
    own = {f"mtp.layers.0.{name}": each.clone() for name, each in layer.items()}
    own |= {
        f"mtp.{name}.weight": torch.ones(HIDDEN) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    own["mtp.fc.weight"] = torch.randn((HIDDEN, 2 * HIDDEN), generator=torch.Generator().manual_seed(1)) * 0.3
    save_file(tensors | own, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_targets_own_prediction_drafts_and_says_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelDrafter, "measure", lambda drafter: None)  # seconds, of no use here
    target = save_target(tmp_path)
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
    target = save_target(tmp_path)
    kept = {
        name: each for name, each in load_file(target / "model.safetensors").items() if not name.startswith("mtp.")
    }
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match="carries multi-token prediction"):
        build_catalogue(DraftConfig(drafters=("model:mtp",), target_model=str(target), engine=SETTINGS))
