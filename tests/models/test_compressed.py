"""Checkpoints of compressed-tensors: what its own compressors wrote, served as the floats that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from paceline.engine.loading import load_engine
from paceline.engine.weights import load_decoder
from paceline.models.resolve import resolve
from paceline.protocol.errors import InvalidInput
from tests.engine import tiny
from tests.engine.test_families import SETTINGS
from tests.models.saving import save_with_tokenizer
from tests.models.test_packed import DENSE, EXPERTS, Rounding, check_served, quantize
from tests.models.test_quantized import changed_config

pytest.importorskip("compressed_tensors", reason="an extra: pip install 'paceline[compressed]'")

GROUP = 8


def scheme(bits: int, type_: str, strategy: str, *, symmetric: bool = True) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": type_, "strategy": strategy, "symmetric": symmetric, "dynamic": False}
    if strategy == "group":
        weights["group_size"] = GROUP
    return {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}


def entry(format_: str, *groups: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": dict(group) for index, group in enumerate(groups)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    } | changes


def compressor(format_: str, group: Mapping[str, Any]) -> Rounding:
    """Round a layer, and have the library pack it; what it stands for is computed here."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    packed: Any = BaseCompressor.get_value_from_registry(format_)
    parsed = QuantizationScheme.model_validate(group)
    weights = group["weights"]
    steps = 448.0 if weights["type"] == "float" else 2.0 ** (weights["num_bits"] - 1) - 1

    def rounding(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        size = {"group": GROUP, "channel": weight.shape[1], "tensor": weight.numel()}[weights["strategy"]]
        whole = weights["strategy"] == "tensor"
        blocks = weight.reshape(1, -1, size) if whole else weight.unflatten(1, (-1, size))  # [outputs, groups, size]
        scale = blocks.abs().amax(dim=-1) / steps
        zero = torch.zeros_like(scale)
        if not weights["symmetric"]:
            zero = (torch.arange(scale.numel()).reshape(scale.shape) % 5 - 2).float()
        if weights["type"] == "float":
            values = (blocks / scale[..., None]).to(torch.float8_e4m3fn).float()
        else:
            values = (blocks / scale[..., None] + zero[..., None]).round().clamp(-steps - 1, steps).int()
        stands_for = ((values - zero[..., None]) * scale[..., None]).reshape(weight.shape)
        state = {"weight": weight, "weight_scale": scale.reshape(1) if whole else scale}
        if not weights["symmetric"]:
            state["weight_zero_point"] = zero.to(torch.int8)
        return {part: tensor.contiguous() for part, tensor in packed.compress(state, parsed).items()}, stands_for

    return rounding


FORMATS = {
    "int4 in groups": ("pack-quantized", scheme(4, "int", "group")),
    "int4 in groups, zeros": ("pack-quantized", scheme(4, "int", "group", symmetric=False)),
    "int8 packed": ("pack-quantized", scheme(8, "int", "channel")),
    "int8": ("int-quantized", scheme(8, "int", "channel")),
    "fp8": ("float-quantized", scheme(8, "float", "channel")),
    "fp8 of one scale": ("naive-quantized", scheme(8, "float", "tensor")),
}


IN_CI = ("int4 in groups, zeros", "fp8 of one scale")
"""The tests of experts and of groups have integers packed and plain."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in IN_CI else pytest.mark.full) for each in FORMATS]
)
def test_what_the_library_compressed_is_served_as_the_floats_that_it_stands_for(tmp_path: Path, name: str) -> None:
    format_, group = FORMATS[name]
    folder = check_served(tmp_path, DENSE, compressor(format_, group), entry(format_, group))
    library, wanted = AutoModelForCausalLM, CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="You passed `quantization_config`"):
        reference: Any = library.from_pretrained(folder, quantization_config=wanted, dtype="float32")
    mine = load_decoder(resolve(folder), SETTINGS).state_dict()
    for part, tensor in reference.state_dict().items():
        torch.testing.assert_close(mine[part], tensor, rtol=1e-6, atol=0)


def test_experts_are_served_as_the_floats_that_they_stand_for(tmp_path: Path) -> None:
    format_, group = FORMATS["int4 in groups"]
    check_served(tmp_path, EXPERTS, compressor(format_, group), entry(format_, group))


def test_every_layer_is_unpacked_by_its_own_group(tmp_path: Path) -> None:
    narrow = scheme(4, "int", "group") | {"targets": [r"re:.*mlp\..*"], "format": "pack-quantized"}
    wide = scheme(8, "int", "channel") | {"targets": [r"re:.*self_attn\..*"], "format": "int-quantized"}
    roundings = {24: compressor("pack-quantized", narrow), 32: compressor("int-quantized", wide)}
    config = DENSE

    def rounding(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return roundings[24 if config.intermediate_size in weight.shape else 32](weight)

    folder = check_served(tmp_path, config, rounding, entry("mixed-precision", narrow, wide))
    changed_config(
        Path(folder), {"quantization_config": entry("mixed-precision", narrow, wide | {"targets": ["nope"]})}
    )
    with pytest.raises(
        InvalidInput, match=r"config_groups of layer model\.layers\.0\.self_attn\.\S+ = \[\]: must be one"
    ):
        load_engine(folder, SETTINGS)


DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activations": (
        {"config_groups": {"group_0": FORMATS["int8"][1] | {"input_activations": DYNAMIC}}},
        r"config_groups\.group_0\.input_activations = .*: must be absent: activations keep their precision",
    ),
    "order": (
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "actorder": "group"}}}},
        r"config_groups\.group_0\.weights\.actorder = 'group'",
    ),
    "keys and values": ({"kv_cache_scheme": {"num_bits": 8}}, r"quantization_config\.kv_cache_scheme"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"quantization_config\.sparsity_config"),
    "transforms": ({"transform_config": {"config_groups": {"R1": {}}}}, r"quantization_config\.transform_config"),
    "format": ({"format": "nvfp4-pack-quantized"}, r"quantization_config\.format = 'nvfp4-pack-quantized'"),
    "status": ({"quantization_status": "frozen"}, r"quantization_config\.quantization_status = 'frozen'"),
    "no groups": ({"config_groups": {}}, r"quantization_config\.config_groups = \[\]: must be groups of weights"),
    "groups of nothing": ({"config_groups": [1]}, r"quantization_config\.config_groups = \[1\]: must be valid"),
    "another format's tensors": ({"format": "pack-quantized"}, r"layer \S+: tensors = \['weight', 'weight_scale'\]"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("compressed")
    save_with_tokenizer(tiny.random_model(DENSE), made)
    quantize(made, compressor(*FORMATS["int8"]), entry(*FORMATS["int8"]))
    return made


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_unpacked_is_refused_by_its_key(folder: Path, name: str) -> None:
    changes, message = REFUSED[name]
    changed_config(folder, {"quantization_config": entry(*FORMATS["int8"]) | changes})
    with pytest.raises(InvalidInput, match=message) as caught:
        load_engine(str(folder), SETTINGS)
    assert len(caught.value.message.splitlines()) == 1


def test_the_library_is_asked_for_where_it_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_config(folder, {"quantization_config": entry(*FORMATS["int8"])})
    assert load_engine(str(folder), SETTINGS).info.max_length == SETTINGS.max_model_len
    monkeypatch.setattr("paceline.models.quantized.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'paceline\[compressed\]'"):
        load_engine(str(folder), SETTINGS)
