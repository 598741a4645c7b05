"""Checkpoints with multi-token prediction: what is found in them, and what isn't served, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.drafters.formats.mtp import find_mtp, is_speculators_mtp, load_mtp
from paceline.protocol.errors import DamagedFile, InvalidInput, Unsupported
from paceline.runtime.config import EngineSettings
from tests.drafters.heads.tiny_mtp import HIDDEN, change, write
from tests.models.saving import change_json

SETTINGS = EngineSettings(threads=1, device="cpu")


def test_its_own_head_and_embedding_are_preferred(tmp_path: Path) -> None:
    written = write(tmp_path, "glm4_moe")
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.2.mlp.experts.3.gate_proj.weight" in names, "one by one, as published: the loader joins them"
    found = find_mtp(tmp_path)
    assert torch.equal(found.head(), written.head)
    change(tmp_path, lambda name: "shared_head.head" not in name)
    assert torch.equal(find_mtp(tmp_path).head(), load_file(tmp_path / "model.safetensors")["lm_head.weight"])
    change(tmp_path, lambda name: name != "lm_head.weight")
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    assert torch.equal(find_mtp(tmp_path).head(), written.embedding)


@pytest.mark.parametrize(
    ("name", "prefix", "message"),
    [
        ("glm4_moe", "model.layers.2.", r"1 layers .* config.json states: .* none of their tensors.*quantised"),
        ("qwen3_next", "mtp.", r"neither its config\.json nor its files have any"),
    ],
    ids=["a copy that dropped them", "never had any"],
)
def test_a_checkpoint_without_their_tensors_is_named(tmp_path: Path, name: str, prefix: str, message: str) -> None:
    write(tmp_path, name)
    change(tmp_path, lambda tensor: not tensor.startswith(prefix))
    with pytest.raises(InvalidInput, match=message):
        find_mtp(tmp_path)


def _configured(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: change_json(folder / "config.json", **changes)


def _changed(name: str, tensor: torch.Tensor | None = None) -> Callable[[Path], object]:
    """Without a tensor of the prediction, or with another one in its place."""
    name = f"model.layers.2.{name}"
    return lambda folder: change(folder, lambda each: each != name, None if tensor is None else {name: tensor})


def _damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no tensors")


DEPTHS = r"tensors of 1'?: must be the 2 of its config.json"
QUANTISED = torch.zeros(HIDDEN, 2 * HIDDEN).to(torch.float8_e4m3fn)
SCALE = "self_attn.o_proj.weight_scale_inv"
SHAPE = r"fusions.0.projection.weight \[32, 32\], not \[32, 64\]"
HALF = r"tensors missing: 1 \(model.layers.0.self_attn.o_proj.weight\)"
REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "fewer depths": (_configured(num_nextn_predict_layers=2), InvalidInput, DEPTHS),
    "no norm": (_changed("hnorm.weight"), InvalidInput, "tensor model.layers.2.hnorm.weight is missing"),
    "half a layer": (_changed("self_attn.o_proj.weight"), InvalidInput, HALF),
    "another shape": (_changed("eh_proj.weight", torch.zeros(HIDDEN, HIDDEN)), InvalidInput, SHAPE),
    "quantised": (_changed("eh_proj.weight", QUANTISED), Unsupported, "eh_proj.weight of torch.float8_e4m3fn"),
    "scales": (_changed(SCALE, torch.ones(1)), Unsupported, "weight_scale_inv: not those of Glm4MoeForCausalLM's"),
    "layers nobody knows": (_configured(model_type="glm9"), Unsupported, "glm9, which transformers doesn't have"),
    "damaged": (_damaged, DamagedFile, "model.safetensors"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_served_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    write(tmp_path, "glm4_moe")
    make, error, said = REFUSED[fault]
    make(tmp_path)
    with pytest.raises(error, match=said):
        load_mtp(find_mtp(tmp_path), SETTINGS)


def test_speculators_folder_is_told_from_its_configuration_and_must_be_lossless(tmp_path: Path) -> None:
    write(tmp_path, "speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.5}]
    facts = {
        "speculators_model_type": "mtp",
        "transformer_layer_config": config,
        "num_nextn_predict_layers": 1,
        "speculators_config": {"algorithm": "mtp", "proposal_methods": methods},
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    assert is_speculators_mtp(facts)
    with pytest.raises(Unsupported, match=r"accept_tolerance = 0\.5"):
        find_mtp(tmp_path)
    del methods[0]["accept_tolerance"]
    (tmp_path / "config.json").write_text(json.dumps(facts))
    assert find_mtp(tmp_path).depths == 1
