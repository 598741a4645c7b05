"""Medusa's two layouts: the same heads from each, and what is refused, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.catalogue import build_catalogue
from paceline.drafters.formats.kinds import kind_of, load_kind
from paceline.engine.features import FeatureEngine
from paceline.protocol.errors import InvalidInput, PacelineError, Unsupported
from paceline.protocol.features import FINAL, FeatureNeed
from paceline.runtime.config import DraftConfig, EngineSettings
from tests.drafters.heads.lookahead_files import (
    HEADS,
    HIDDEN,
    Tensors,
    medusa_says,
    own_tensors,
    seeded,
    vllm_tensors,
    write,
)
from tests.engine.tiny import VOCAB, chain, llama, random_model, step
from tests.models.saving import save_with_tokenizer

SETTINGS = EngineSettings(threads=1, device="cpu")
FEATURE = seeded(HIDDEN, seed=77) * HIDDEN**0.5
PATH = (5, 9, 2)
PT, SAFE = "medusa_lm_head.pt", "model.safetensors"


@dataclass(frozen=True)
class SavedTarget:
    folder: Path
    embedding: torch.Tensor
    head: torch.Tensor


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> SavedTarget:
    model: Any = random_model(llama())
    folder = tmp_path_factory.mktemp("target")
    save_with_tokenizer(model, folder)
    return SavedTarget(folder, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())


def load(folder: Path, target: SavedTarget) -> FeatureEngine:
    kind = kind_of(folder)
    assert kind is not None
    return load_kind(kind, folder, str(target.folder), SETTINGS)


def logits_of(engine: FeatureEngine) -> np.ndarray:
    """Logits [heads, V] of each head, of `FEATURE` at position 0, behind `PATH`."""
    engine.open(1, 64)
    engine.give(1, 0, FEATURE.numpy()[None])
    rows = step(engine, chain(1, 0, (7, *PATH)))[1:]
    engine.close(1)
    return rows


def by_definition(tensors: Tensors) -> np.ndarray:
    return torch.stack([medusa_says(tensors, head, FEATURE) for head in range(HEADS)]).numpy()


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "file", "config"),
    [
        # Uploaded configurations say 2 heads where the code made 5: tensors are counted.
        (own_tensors(), PT, {"medusa_num_heads": 2, "medusa_num_layers": 1}),
        (own_tensors(), "medusa_lm_head.safetensors", None),
        ({f"medusa_head.{name}": each for name, each in own_tensors().items()}, PT, None),
        (vllm_tensors(), SAFE, {"model_type": "medusa", "num_heads": 1, "truncated_vocab_size": VOCAB}),
        (vllm_tensors() | {"token_map": torch.arange(3)}, SAFE, {"truncated_vocab_size": VOCAB}),
    ],
)
def test_both_layouts_are_the_same_heads(
    tmp_path: Path, target: SavedTarget, tensors: Tensors, file: str, config: Mapping[str, Any] | None
) -> None:
    engine = load(write(tmp_path / "heads", tensors, file, config), target)
    assert engine.need == FeatureNeed((FINAL,))
    assert (engine.reach, engine.feature_width) == (HEADS, HIDDEN)
    assert_same(logits_of(engine), by_definition(own_tensors()))


def test_heads_without_outputs_share_the_targets(tmp_path: Path, target: SavedTarget) -> None:
    engine = load(write(tmp_path / "heads", own_tensors(outputs=False), PT), target)
    shared = own_tensors(outputs=False) | {f"{head}.2.weight": target.head for head in range(HEADS)}
    assert_same(logits_of(engine), by_definition(shared))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("original", [True, False])
def test_truncated_vocabulary(tmp_path: Path, target: SavedTarget, whole: bool, original: bool) -> None:
    ids = torch.tensor([4, 90, 17, 3])
    tensors = vllm_tensors()
    outputs = {f"{head}.2.weight": tensors[f"lm_heads.{0 if original else head}.weight"] for head in range(HEADS)}
    for head in range(HEADS):
        output = tensors.pop(f"lm_heads.{head}.weight")
        if head == 0 or not original:
            tensors[f"lm_heads.{head}.weight"] = output if whole else output[ids]
    config = {"truncated_vocab_size": len(ids), "original_lm_head": original, "logit_scale": 0.5}
    folder = write(tmp_path / "heads", tensors | {"token_map": ids}, SAFE, config)
    expected = np.full((HEADS, VOCAB), -np.inf, np.float32)
    expected[:, ids] = 0.5 * by_definition(own_tensors() | outputs)[:, ids]
    assert_same(logits_of(load(folder, target)), expected)


def test_original_head_is_the_targets(tmp_path: Path, target: SavedTarget) -> None:
    tensors = {name: each for name, each in vllm_tensors().items() if "lm_heads" not in name}
    engine = load(write(tmp_path / "heads", tensors, SAFE, {"original_lm_head": True}), target)
    outputs = {f"{head}.2.weight": target.head for head in range(HEADS)}
    assert_same(logits_of(engine), by_definition(own_tensors() | outputs))


def _without(tensors: Tensors, *names: str) -> Tensors:
    return {name: each for name, each in tensors.items() if name not in names}


OWN, VLLM = own_tensors(), vllm_tensors()
TYPICAL = {"spec_decoding_acceptance_method": "typical_acceptance_sampler"}
WIDER = OWN | {"1.2.weight": seeded(VOCAB + 3, HIDDEN, seed=1)}
MAPPED = VLLM | {"token_map": torch.tensor([1, VOCAB])}
REFUSED: dict[str, tuple[Tensors, Mapping[str, Any], type[PacelineError], str]] = {
    "typical": (OWN, {"posterior_threshold": 0.09}, Unsupported, "posterior_threshold = 0.09: typical"),
    "vllm's typical": (VLLM, TYPICAL, Unsupported, "spec_decoding_acceptance_method = typical_acceptance_sampler"),
    "hidden size": (own_tensors(hidden=16), {}, InvalidInput, "hidden size.*16.*32"),
    "vocabulary": (WIDER, {}, InvalidInput, f"vocabulary.*{VOCAB + 3}.*{VOCAB}"),
    "a head's layer": (_without(OWN, "1.1.linear.weight"), {}, InvalidInput, r"missing: 1 \(1\.1\.linear\.weight"),
    "another tensor": (OWN | {"extra": torch.zeros(1)}, {}, Unsupported, "tensor extra"),
    "vllm's output": (_without(VLLM, "lm_heads.1.weight"), {}, InvalidInput, r"missing: 1 \(lm_heads\.1"),
    "no map": (VLLM, {"truncated_vocab_size": 5}, InvalidInput, "token_map among them"),
    "map": (MAPPED, {"truncated_vocab_size": 2}, InvalidInput, f"token_map.*{VOCAB}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path: Path, target: SavedTarget, case: str) -> None:
    tensors, config, error, named = REFUSED[case]
    folder = write(tmp_path / "heads", tensors, SAFE, config)
    with pytest.raises(error, match=named):
        load(folder, target)


def test_the_catalogue_serves_them(tmp_path: Path, target: SavedTarget) -> None:
    folder = write(tmp_path / "heads", own_tensors(), PT)
    settings: dict[str, Any] = {"drafters": (f"model:{folder}",), "engine": SETTINGS}
    catalogue = build_catalogue(DraftConfig(target_model=str(target.folder), **settings))
    assert catalogue.drafters[catalogue.names[0]].manifest.need == FeatureNeed((FINAL,))
    assert catalogue.lines["", False].ms(4) > 0
    with pytest.raises(InvalidInput, match=r"target_model.*medusa"):
        build_catalogue(DraftConfig(target_model=None, **settings))
