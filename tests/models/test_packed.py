"""Weights that AWQ and GPTQ packed: what their own packers wrote, read as the floats that it stands for.

`tests/vectors/packed_weights.safetensors` holds a layer [32 outputs, 32 inputs] in groups of 16 for each format,
written by AutoAWQ 0.2.9 and AutoRound 0.16.1, and the weights that they were given, which are whole numbers of steps.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3MoeConfig

from paceline.engine import weights
from paceline.engine.loading import load_engine
from paceline.engine.parallel.decoder import load_decoder_share
from paceline.engine.weights import load_decoder
from paceline.models.packed import Packing, awq, gptq
from paceline.models.resolve import resolve
from paceline.protocol.errors import InvalidInput
from tests.engine import tiny
from tests.engine.families import _EXPERTS, _SHAPE
from tests.engine.parallel.ranks import run_ranks
from tests.engine.test_families import SETTINGS, greedy
from tests.models.saving import save_with_tokenizer
from tests.models.test_quantized import changed_config

VECTORS = Path(__file__).parents[1] / "vectors" / "packed_weights.safetensors"
GROUP = 16
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_AWQ_NEIGHBOURS = (0, 2, 4, 6, 1, 3, 5, 7)


def vectors(format_: str) -> dict[str, torch.Tensor]:
    prefix = f"{format_}."
    return {
        name.removeprefix(prefix): tensor for name, tensor in load_file(VECTORS).items() if name.startswith(prefix)
    }


def packed_into(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] integers → [..., n · bits / 32], the first in the lowest bits."""
    wide = values.long().unflatten(-1, (-1, 32 // bits))
    joined = (wide << torch.arange(0, 32, bits)).sum(dim=-1)
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).int()


def awq_layer(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Round a layer as AWQ does; its tensors, and the weight that they stand for."""
    groups = weight.T.unflatten(0, (-1, GROUP))  # [groups, inputs, outputs]
    low, high = groups.amin(dim=1), groups.amax(dim=1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15).int()
    values = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15).int()
    stands_for = ((values - zeros[:, None]) * scales.float()[:, None]).flatten(0, 1).T.contiguous()

    def joined(part: torch.Tensor) -> torch.Tensor:
        return packed_into(part.unflatten(-1, (-1, 8))[..., _AWQ_NEIGHBOURS].flatten(-2), 4)

    return {"qweight": joined(values.flatten(0, 1)), "qzeros": joined(zeros), "scales": scales}, stands_for


Rounding = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


def quantize(folder: Path, rounding: Rounding, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Pack every projection of a folder's layers; what they stand for, by its own names."""
    tensors, stand_for = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        layer, stand_for[name] = rounding(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    changed_config(folder, {"quantization_config": entry})
    return stand_for


def in_floats(packed: Path, stand_for: Mapping[str, torch.Tensor], folder: Path) -> str:
    """The same folder, its packed layers as the floats that they stand for."""
    shutil.copytree(packed, folder)
    stems = tuple(name.removesuffix("weight") for name in stand_for)
    stored = load_file(folder / "model.safetensors").items()
    tensors = {name: each for name, each in stored if name.endswith(".bias") or not name.startswith(stems)}
    save_file({**tensors, **stand_for}, folder / "model.safetensors", {"format": "pt"})
    return changed_config(folder, {"quantization_config": None})


DENSE = LlamaConfig(**_SHAPE, attention_bias=True, tie_word_embeddings=True)
EXPERTS = Qwen3MoeConfig(**{**_SHAPE, **_EXPERTS, "num_experts": 2})


def check_served(tmp_path: Path, config: Any, rounding: Rounding, entry: Mapping[str, Any]) -> str:
    """The text of the packed folder, its weights, and that nothing but the rounding has changed them."""
    packed, floats = tmp_path / "packed", tmp_path / "floats"
    save_with_tokenizer(tiny.random_model(config), packed)
    original = load_engine(str(packed), SETTINGS).info.fingerprint
    stand_for = quantize(packed, rounding, entry)
    plain = in_floats(packed, stand_for, floats)
    mine, theirs = (load_decoder(resolve(folder), SETTINGS).state_dict() for folder in (str(packed), plain))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    engine, reference = load_engine(str(packed), SETTINGS), load_engine(plain, SETTINGS)
    assert greedy(engine) == greedy(reference)
    assert original.numeric != engine.info.fingerprint.numeric == reference.info.fingerprint.numeric
    return str(packed)


def test_awq_is_read_as_its_own_packer_wrote_it() -> None:
    layer = vectors("awq")
    torch.testing.assert_close(awq(GROUP).weight("layer", layer), layer["weight"], rtol=0, atol=0)


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_model_in_awq_is_served_as_the_floats_that_it_stands_for(tmp_path: Path, config: Any) -> None:
    folder = check_served(tmp_path, config, awq_layer, AWQ)
    if config is DENSE:  # ranks have no experts
        run_ranks(1, lambda group: load_decoder_share(folder, SETTINGS, group, torch.device("cpu")), lambda _: None)


def gptq_rounding(bits: int, *, order: bool = False, version: int = 1, group_size: int = GROUP) -> Rounding:
    """How GPTQ packs a layer; with `order`, inputs of a group lie apart."""

    def rounding(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        outputs, inputs = weight.shape
        size = inputs if group_size == -1 else group_size
        generator = torch.Generator().manual_seed(inputs)
        group = torch.arange(inputs) // size
        group = group[torch.randperm(inputs, generator=generator)] if order else group
        most = 2**bits - 1
        zeros = torch.randint(1, most + 1, (inputs // size, outputs), generator=generator)
        scales = (weight.abs().amax() / most + torch.rand(zeros.shape, generator=generator) * 0.01).half()
        values = (weight.T / scales.float()[group] + zeros[group]).round().clamp(0, most).long()
        stands_for = ((values - zeros[group]) * scales.float()[group]).T.contiguous()
        stored = zeros - 1 if version == 1 else zeros
        layer = {"qweight": packed_into(values.T, bits).T, "qzeros": packed_into(stored, bits), "scales": scales}
        layer |= {"g_idx": group.int()} if order or version == 1 else {}
        return {name: tensor.contiguous() for name, tensor in layer.items()}, stands_for

    return rounding


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("format_", ["gptq", "gptq_v2"])
def test_gptq_is_read_as_its_own_packer_wrote_it(format_: str, bits: int) -> None:
    layer = vectors(f"{format_}.{bits}")
    found = gptq(bits, GROUP, zeros_less_one=format_ == "gptq").weight("layer", layer)
    torch.testing.assert_close(found, layer["weight"], rtol=0, atol=0)


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
ROUNDINGS = [
    (gptq_rounding(4), GPTQ),
    (gptq_rounding(4, order=True), GPTQ | {"desc_act": True, "static_groups": True, "meta": {"damp_percent": 0.01}}),
    (gptq_rounding(8, version=2), GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}),
    (gptq_rounding(2, group_size=-1), GPTQ | {"bits": 2, "group_size": -1, "format": "gptq"}),
]


@pytest.mark.parametrize(
    ("config", "rounding", "entry"),
    [
        pytest.param(config, *each, marks=() if (config is EXPERTS) == (place % 2 == 0) else pytest.mark.full)
        for place, each in enumerate(ROUNDINGS)
        for config in (DENSE, EXPERTS)
    ],
)
def test_a_model_in_gptq_is_served_as_the_floats_that_it_stands_for(
    tmp_path: Path, config: Any, rounding: Rounding, entry: Mapping[str, Any]
) -> None:
    check_served(tmp_path, config, rounding, entry)


REFUSED_GPTQ = [
    ({"bits": 3}, r"quantization_config\.bits = 3: must be 4 or 8 or 2"),
    ({"checkpoint_format": "marlin"}, r"\.checkpoint_format = 'marlin': must be 'gptq' or 'gptq_v2'"),
    ({"is_marlin_format": True}, r"quantization_config\.is_marlin_format = True: must be absent"),
    ({"dynamic": {"+:.*down": {"bits": 8}}}, r"quantization_config\.dynamic"),
    ({"group_size": 8}, r"layer \S+: groups = \d: must be \d, of \d+ inputs by 8"),
    ({"bits": 8}, r"layer \S+: groups = \d: must be \d, of \d+ inputs by 16"),
]
REFUSED_AWQ = [
    ({"bits": 8}, r"quantization_config\.bits = 8: must be 4"),
    ({"bits": "4"}, r"quantization_config\.bits = '4'"),
    ({"version": "gemv"}, r"quantization_config\.version = 'gemv': must be 'gemm'"),
    ({"zero_point": False}, r"quantization_config\.zero_point = False: must be True"),
    ({"group_size": 0}, r"quantization_config\.group_size = 0"),
    ({"group_size": -1}, r"layer model\.layers\.0\.\S+: groups = [23]: must be 1, of \d+ inputs by -1"),
    ({"desc_act": True}, r"quantization_config\.desc_act = True: must be absent"),
]


@pytest.mark.parametrize(
    ("rounding", "entry", "cases"), [(gptq_rounding(4), GPTQ, REFUSED_GPTQ), (awq_layer, AWQ, REFUSED_AWQ)]
)
def test_an_option_that_is_not_unpacked_is_refused(
    tmp_path: Path, rounding: Rounding, entry: dict[str, Any], cases: list[tuple[dict[str, Any], str]]
) -> None:
    save_with_tokenizer(tiny.random_model(DENSE), tmp_path)
    quantize(tmp_path, rounding, entry)
    assert load_engine(str(tmp_path), SETTINGS).info.max_length == SETTINGS.max_model_len
    for changes, message in cases:
        changed_config(tmp_path, {"quantization_config": entry | changes})
        with pytest.raises(InvalidInput, match=message):
            load_engine(str(tmp_path), SETTINGS)


def test_zeros_and_groups_of_gptq_that_say_several_things_are_refused() -> None:
    layer = vectors("gptq.4")
    packing = gptq(4, GROUP, zeros_less_one=True)
    with pytest.raises(InvalidInput, match=r"layer up: g_idx = \[0, 0, .*: must be 16 inputs of each of 2 groups"):
        packing.weight("up", layer | {"g_idx": torch.zeros(32, dtype=torch.int32)})
    with pytest.raises(InvalidInput, match=r"zeros that are 0 in checkpoint_format gptq = 1: must be 0"):
        packing.weight("up", layer | {"qzeros": layer["qzeros"].clone().index_put_((torch.tensor(0),) * 2, ONE_LOST)})


ONE_LOST = torch.tensor(0x1234F123, dtype=torch.int32)


def test_packed_layers_that_are_not_whole_or_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_tokenizer(tiny.random_model(DENSE), tmp_path)
    quantize(tmp_path, awq_layer, AWQ)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({name: each for name, each in whole.items() if name != f"{LAYER}.qzeros"}, file, {"format": "pt"})
    with pytest.raises(InvalidInput, match=rf"packed layers = '{LAYER}': must be whole: qweight, qzeros, scales"):
        load_engine(str(tmp_path), SETTINGS)
    save_file(whole, file, {"format": "pt"})
    monkeypatch.setattr(weights, "available_ram", lambda: file.stat().st_size)
    with pytest.raises(InvalidInput, match=r"must be one whose weights fit: .* unpacked"):
        load_engine(str(tmp_path), SETTINGS)


LAYER = "model.layers.1.mlp.up_proj"


def _mutant(path: str, layer: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return awq(GROUP).weight(path, layer).roll(1, dims=0)


def test_the_comparison_catches_neighbours_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = awq(GROUP)
    wrong = Packing(right.parts, right.optional, right.values, _mutant)
    monkeypatch.setattr("paceline.models.quantized.awq", lambda group_size: wrong)
    with pytest.raises(AssertionError):
        check_served(tmp_path, DENSE, awq_layer, AWQ)
