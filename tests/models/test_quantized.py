"""Checkpoints that other tools have quantized: refused by the method's name wherever they are loaded, or unpacked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.drafters.formats.kinds import DraftKind, load_onto
from paceline.engine.loading import load_engine
from paceline.engine.parallel.decoder import load_decoder_share
from paceline.engine.weights import load_decoder, load_decoder_config
from paceline.models.resolve import ModelSource, resolve
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import EngineSettings
from tests.engine import tiny
from tests.engine.families import named
from tests.engine.parallel.ranks import run_ranks
from tests.models.saving import change_json, save_with_tokenizer

THREAD = EngineSettings(threads=1, kv_bytes=1 << 24, max_model_len=64)
ENTRIES: dict[str, dict[str, Any]] = {
    "some new method": {"quantization_config": {"quant_method": "some new method", "bits": 4}},
    "bitsandbytes": {"quantization_config": {"load_in_4bit": True}},
    "compressed": {"compression_config": {"quant_method": "compressed", "format": "pack-quantized"}},
    "{'group_size': 64": {"quantization": {"group_size": 64, "bits": 4}},
}


def changed_config(folder: Path, changes: dict[str, Any]) -> str:
    """A folder whose `config.json` says something else."""
    change_json(folder / "config.json", **changes)
    return str(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_with_tokenizer(tiny.random_model(tiny.llama()), folder)
    return folder


@pytest.mark.parametrize("method", ENTRIES)
def test_a_method_that_is_not_unpacked_is_refused_by_its_name(whole: Path, tmp_path: Path, method: str) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    folder = changed_config(tmp_path, ENTRIES[method])
    ways = (
        lambda: load_engine(folder, THREAD),
        lambda: load_decoder_config(ModelSource("some/hub-id", "hub", folder), THREAD),
        lambda: run_ranks(1, lambda group: load_decoder_share(folder, THREAD, group, torch.device("cpu")), print),
        lambda: load_onto(DraftKind("any", lambda _: True, _never), tmp_path, _never(), THREAD),
    )
    for way in ways:
        with pytest.raises(InvalidInput, match=r"quantization_config\.quant_method") as caught:
            way()
        assert method in caught.value.message
        assert "take its float weights" in caught.value.message
        assert len(caught.value.message.splitlines()) == 1
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    assert load_engine(folder, THREAD).info.max_length == 64


def _never(*_: Any) -> Any:
    """Stands for what isn't reached."""


def _in_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give every product numbers of eight bits and a scale; returns what they stand for."""
    stand_for = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().max() / torch.finfo(torch.float8_e4m3fn).max
        rounded = (tensors[name] / scale).to(torch.float8_e4m3fn)
        stand_for[name] = rounded.float() * scale
        tensors |= {name: rounded, f"{name}_scale_inv": scale.reshape(1, 1)}
    return stand_for


def test_weights_in_fp8_are_served_as_the_floats_that_they_stand_for(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    stand_for = _in_fp8(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    entry = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    folder = changed_config(tmp_path, {"quantization_config": entry})
    loaded = dict(load_decoder(resolve(folder), THREAD).named_parameters())
    for name, weight in stand_for.items():
        torch.testing.assert_close(loaded[name].data, weight, rtol=0, atol=0)
    rounded, plain = load_engine(folder, THREAD).info.fingerprint, load_engine(str(whole), THREAD).info.fingerprint
    assert rounded.numeric != plain.numeric
    changed_config(tmp_path, {"quantization_config": entry | {"activation_scheme": "static"}})
    with pytest.raises(InvalidInput, match="activation_scheme = 'static': must be dynamic"):
        load_engine(folder, THREAD)


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three lower bits of a number of the OCP format E2M1; the fourth is the sign."""


def test_experts_in_mxfp4_are_served_as_the_floats_that_they_stand_for(tmp_path: Path) -> None:
    config = named("gpt-oss").config()
    config.intermediate_size = 32  # whole blocks
    save_with_tokenizer(tiny.random_model(config), tmp_path)
    tensors, stand_for = load_file(tmp_path / "model.safetensors"), {}
    values = torch.tensor([*FP4, *(-value for value in FP4)])
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        generator = torch.Generator().manual_seed(len(name))
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 128, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
        numbers = values[nibbles] * torch.exp2(scales.float() - 127)[..., None]
        stand_for[name] = numbers.reshape(experts, outputs, inputs).transpose(1, 2)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    folder = changed_config(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})
    loaded = dict(load_decoder(resolve(folder), THREAD).named_parameters())
    for name, weight in stand_for.items():
        torch.testing.assert_close(loaded[name].data, weight, rtol=0, atol=0)
    assert load_engine(folder, THREAD).info.max_length == 64
